# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The sizes that a plan depends on."""

from dataclasses import dataclass

from mcore_parallel.models import TransformerConfig, feed_forward_share, flops_per_token, num_parameters
from mcore_parallel.nn import Activation
from mcore_parallel.planner._errors import PlannerError


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """A mixture of experts in every layer's feed-forward.

    Raises:
        PlannerError: sizes out of range.
    """

    num_experts: int
    topk: int
    """Experts a token goes to."""
    ffn_hidden_size: int
    """Width of one expert."""
    shared_ffn_hidden_size: int = 0
    """Width of the experts that every token passes, together; cut over tp like a dense feed-forward."""
    latent_size: int = 0
    """Width that tokens are projected to before their experts, and back from; 0 for the hidden size. Parameters and operations are
    counted, time and memory are not estimated."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "topk", "ffn_hidden_size"):
            if getattr(self, name) < 1:
                raise PlannerError(f"{name}={getattr(self, name)} of the experts must be at least 1")
        if self.topk > self.num_experts:
            raise PlannerError(f"topk={self.topk} must not exceed num_experts={self.num_experts}; lower topk")
        for name in ("shared_ffn_hidden_size", "latent_size"):
            if getattr(self, name) < 0:
                raise PlannerError(f"{name}={getattr(self, name)} must not be negative; 0 is for none")


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """An architecture: a `TransformerConfig` and the experts beside it.

    Example:
        >>> tiny = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16)
        >>> ModelSizes(config=tiny).num_parameters
        2344
    """

    config: TransformerConfig
    experts: ExpertSizes | None = None
    """None for dense feed-forwards."""

    @property
    def num_parameters(self) -> int:
        """All of them, each once."""
        return num_parameters(self.config, feed_forward=self._feed_forward(all_experts=True, biases=True))

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets."""
        return num_parameters(self.config, feed_forward=self._feed_forward(biases=True))

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward of one token, without recomputation."""
        return flops_per_token(self.config, seq_len, feed_forward=self._feed_forward())

    @property
    def feed_forward_flops_share(self) -> float:
        """Part of the layers' GEMMs that their feed-forwards have."""
        return feed_forward_share(self.config, feed_forward=self._feed_forward())

    @property
    def shared_experts_share(self) -> float:
        """Part of the experts' GEMMs that the shared ones have; 0 without."""
        if self.experts is None:
            return 0.0
        shared = self.config.hidden_size * self.experts.shared_ffn_hidden_size
        routed = (self.experts.latent_size or self.config.hidden_size) * self.experts.topk * self.experts.ffn_hidden_size
        return shared / (shared + routed)

    def _feed_forward(self, *, all_experts: bool = False, biases: bool = False) -> int | None:
        """Parameters of a layer's mixture, of all experts or of those one token meets; None for a dense layer."""
        experts, config = self.experts, self.config
        if experts is None:
            return None
        gates = 2 if Activation(name=config.activation).gated else 1
        routed = experts.num_experts if all_experts else experts.topk
        width = routed * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
        blocks = routed + bool(experts.shared_ffn_hidden_size)
        added = (gates * width + blocks * config.hidden_size) * (biases and config.add_bias_linear)
        gate = experts.num_experts * (config.hidden_size + (biases and config.add_bias_linear))
        inner = experts.latent_size or config.hidden_size
        products = (gates + 1) * (inner * routed * experts.ffn_hidden_size + config.hidden_size * experts.shared_ffn_hidden_size)
        return products + 2 * config.hidden_size * experts.latent_size + added + gate
