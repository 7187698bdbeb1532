# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Spans for OpenTelemetry."""

from contextlib import AbstractContextManager
from typing import Any


class TelemetrySpans:
    """A span around each part of a run, under the span that is current; needs the extra ``telemetry``.

    Give it to ``Trainer`` as ``spans``. Without an SDK that the application sets up, the spans cost next to nothing and go nowhere.

    Args:
        tracer: an ``opentelemetry.trace.Tracer``; None for that of the global provider.
        attributes: of every span (rank, run).
    """

    def __init__(self, tracer: Any = None, **attributes: str | int | float) -> None:
        from opentelemetry import trace

        self._tracer = trace.get_tracer("mcore_parallel") if tracer is None else tracer
        self._attributes = attributes

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(name, attributes=self._attributes)
