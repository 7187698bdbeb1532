# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the numbers of a run go."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where the numbers of a run go, beside one JSON line a step in ``train.jsonl``.

    Raises:
        ValueError: a negative number.
    """

    tensorboard: bool = True
    """Event files in ``tensorboard``."""
    html: bool = True
    """Keep ``report.html`` up to date."""
    wandb_project: str = ""
    """Project of Weights & Biases; empty for none."""
    trackio_project: str = ""
    """Project of Trackio, on this machine; empty for none."""
    telemetry: bool = False
    """Spans of OpenTelemetry, to whatever SDK the process was started with (``opentelemetry-instrument``)."""
    straggler_interval: int = 0
    """Steps between two searches for slow ranks; 0 for none."""
    timers_interval: int = 0
    """Steps between two lines that say how long the parts of a step take, on the fastest and the slowest rank; 0 for none."""
    per_layer_values: bool = True
    """With experts, also the auxiliary losses and the load of the experts of each layer, beside their means."""
    peak_tflops: float = 0.0
    """10^12 operations a second of one device, of which the share is reported; 0 for what is known of the device."""

    def __post_init__(self) -> None:
        for name in ("straggler_interval", "timers_interval", "peak_tflops"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
