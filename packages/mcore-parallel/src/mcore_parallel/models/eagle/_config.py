# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The architecture of a draft head, as one JSON file says it."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_parallel.models._config import TransformerConfig, refuse_unknown_fields

_OF_THE_TARGET = (
    "hybrid_layer_pattern", "mamba", "delta_net", "latent_attention", "mtp_num_layers", "mtp_detach", "post_norm", "sandwich_norm",
    "window_size", "window_attn_skip_freq", "rotary_base_window", "no_rope_freq", "softmax_type", "mrope_section",
    "attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "output_multiplier", "share_embeddings_and_output_weights",
)  # fmt: skip
"""Fields that a head leaves at their defaults: it is a plain causal decoder between the target's ends."""
_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default for field in dataclasses.fields(TransformerConfig) if field.name in _OF_THE_TARGET
}


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """A draft head of the EAGLE-3 kind (Li et al., 2025, arXiv:2503.01840).

    Raises:
        ValueError: a field that a head has no use for, no module to read, a draft vocabulary larger than the target's.

    Example:
        >>> target = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=256)
        >>> EagleConfig.of_target(target, draft_vocab_size=128).aux_modules
        ('layers.1', 'layers.3', 'layers.4')
    """

    transformer: TransformerConfig
    """Of the head's layers (``num_layers`` of them, usually 1); ``hidden_size`` and ``vocab_size`` are those of the target."""
    aux_modules: tuple[str, ...]
    """Modules of the target whose outputs the head reads, lowest first, by their names among the parameters: ``layers.1``."""
    draft_vocab_size: int | None = None
    """Tokens that the head can propose; None for all of the target's."""

    def __post_init__(self) -> None:
        config = self.transformer
        for name, default in _DEFAULTS.items():
            if (value := getattr(config, name)) != default:
                raise ValueError(f"transformer.{name}={value!r} is nothing that a draft head has; leave it out")
        if config.position_embedding_type not in ("rope", "yarn", "none"):
            raise ValueError(f'transformer.position_embedding_type={config.position_embedding_type!r} must be "rope", "yarn" or "none"')
        if not self.aux_modules or len(set(self.aux_modules)) < len(self.aux_modules):
            raise ValueError(f"aux_modules={self.aux_modules} must name one module of the target at least, and none twice")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= config.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} must lie between 1 and vocab_size={config.vocab_size}")

    @classmethod
    def of_target(cls, target: TransformerConfig, *, draft_vocab_size: int | None = None) -> "EagleConfig":
        """One layer as the target's attention and dense feed-forward have it, which reads a low, a middle and a high layer of it.

        Args:
            target: its architecture, whatever its layers are.
            draft_vocab_size: as of the class.
        """
        last = target.num_layers - 1
        layers = sorted({min(1, last), max(0, target.num_layers // 2 - 1), max(0, last - 3)})
        changes: dict[str, Any] = {**_DEFAULTS, "num_layers": 1}
        if target.position_embedding_type not in ("rope", "yarn"):
            changes |= {"position_embedding_type": "rope", "max_position_embeddings": None}
        return cls(
            transformer=dataclasses.replace(target, **changes),
            aux_modules=tuple(f"layers.{layer}" for layer in layers),
            draft_vocab_size=draft_vocab_size,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EagleConfig":
        """Inverse of ``dataclasses.asdict``, also behind JSON.

        Raises:
            ValueError: a name that is no field (names the nearest), here or among those of the transformer, or one that is missing.
        """
        refuse_unknown_fields(cls, values)
        if missing := [name for name in ("transformer", "aux_modules") if name not in values]:
            raise ValueError(f"{', '.join(missing)} of EagleConfig has no default; give it")
        transformer, modules = values["transformer"], values["aux_modules"]
        if not isinstance(transformer, Mapping) or isinstance(modules, str):
            raise ValueError("transformer must hold the fields of a TransformerConfig, and aux_modules a list of names")
        return cls(
            transformer=TransformerConfig.from_dict(transformer),
            aux_modules=tuple(modules),
            draft_vocab_size=values.get("draft_vocab_size"),
        )

    @classmethod
    def from_json(cls, path: str | Path) -> "EagleConfig":
        """Read a file.

        Raises:
            ValueError: no JSON object, and what ``from_dict`` raises, with the file's name in front.
            OSError: it cannot be read.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("it holds no object")
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_json(self) -> str:
        """Text of a file; fields of the transformer that have their defaults are left out."""
        whole, fields = dataclasses.asdict(self.transformer), dataclasses.fields(TransformerConfig)
        changed = {field.name: whole[field.name] for field in fields if getattr(self.transformer, field.name) != field.default}
        values = {"transformer": changed, "aux_modules": self.aux_modules, "draft_vocab_size": self.draft_vocab_size}
        return json.dumps(values, indent=1) + "\n"
