# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The Mamba-2 mixer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._factory import LayerFactory
from mcore_parallel.nn.kernels import (
    ChunkPlan,
    SlotSpans,
    SlotStates,
    fits_ssd,
    fixed_ssd,
    fused_ssd,
    fused_ssd_decode,
    has_kernel,
    kernel_plan,
)
from mcore_parallel.nn.mixers._gated_norm import GatedRMSNorm
from mcore_parallel.nn.mixers._heads import GroupRows
from mcore_parallel.nn.mixers._linear_mixer import LinearMixer, LinearMixerConfig, check_sizes
from mcore_parallel.nn.mixers._recurrences import ssd_chunked, ssd_step, step_sizes


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Of a Mamba-2 mixer (Dao and Gu, 2024).

    Raises:
        ValueError: a size below 1, limits in the wrong order.
    """

    state_dim: int = 128
    """Channels of the state of a head's channel."""
    head_dim: int = 64
    """Channels of a head."""
    num_groups: int = 8
    """Groups of heads that share input and output projections of the state."""
    num_heads: int | None = None
    """None for expand * hidden_size / head_dim."""
    expand: int = 2
    """Inner width, in hidden sizes."""
    conv_kernel: int = 4
    """Tokens that the convolution sees."""
    chunk_size: int = 128
    """Tokens of a block of the scan."""
    use_conv_bias: bool = True
    """A bias in the convolution."""
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Step sizes are cut to this range after the softplus."""

    def __post_init__(self) -> None:
        check_sizes(self, "state_dim", "head_dim", "num_groups", "expand", "conv_kernel", "chunk_size")
        if self.num_heads is not None and self.num_heads < 1:
            raise ValueError(f"num_heads={self.num_heads} must be at least 1; leave it out for expand * hidden_size / head_dim")
        if not 0.0 <= self.dt_limits[0] <= self.dt_limits[1]:
            raise ValueError(f"dt_limits={self.dt_limits} must rise from at least 0")

    def heads(self, hidden_size: int) -> int:
        """Number of heads for a model of that width.

        Raises:
            ValueError: ``head_dim`` does not divide the inner width, ``num_groups`` not the heads.
        """
        if self.num_heads is None and self.expand * hidden_size % self.head_dim:
            raise ValueError(
                f"head_dim={self.head_dim} must divide expand * hidden_size = {self.expand * hidden_size}; change it or set num_heads"
            )
        heads = self.num_heads or self.expand * hidden_size // self.head_dim
        if heads % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_heads={heads}; lower num_groups")
        return heads


# T tokens, D model, H heads, P channels of a head, G groups, h heads of a group, N channels of a state, K taps.
class MambaMixer(LinearMixer):
    """Mamba-2 (Dao and Gu, 2024) over tensor-parallel groups of heads.

    ``in_proj.weight`` is [G, 2 h P + 2 N + h, D]: of each group the gates z and the values x of its heads, b, c, and the step sizes.
    ``conv.weight`` [G, h P + 2 N, K] and ``conv.bias`` [G, h P + 2 N] act on x, b and c; ``A_log``, ``D`` and ``dt_bias`` are [H];
    ``norm.weight`` is [H P], ``out_proj.weight`` [D, H P]. All are cut over tp along G or H. Under context parallelism the ranks
    exchange tokens for heads around convolution and scan.

    Args:
        hidden_size: D.
        config: sizes.
        groups: tp and cp are used.
        norm_epsilon: of the gated norm.
        layer: number among the layers of this stage, by which ``Step.states`` keeps its states.
        layers: builds the projections; None for those of ``mcore_parallel.tensor_parallel``.
        batch_invariant: compute convolution, recurrence and norm of a sequence token after token, so that a token's bits depend on its own
            sequence only; the backward is that of chunks. ``layers`` see to the projections.
        dtype: of the weights; ``A_log``, ``D`` and ``dt_bias`` are kept in float32 at least.
        device: of the weights.
        init: draw the weights; False leaves them to a caller.

    Raises:
        HeadSplitError: tp does not divide the groups, cp not the heads of a tp rank.
        ValueError: sizes that do not fit together, ``batch_invariant`` with cp above 1.

    Example:
        >>> from mcore_parallel.nn import Step
        >>> mixer = MambaMixer(32, MambaConfig(head_dim=8, num_groups=2, state_dim=16), ProcessGroups.single())
        >>> mixer(torch.randn(6, 32), Step.causal(2, 3)).shape
        torch.Size([6, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        config: MambaConfig,
        groups: ProcessGroups,
        *,
        norm_epsilon: float = 1e-5,
        layer: int = 0,
        layers: LayerFactory | None = None,
        batch_invariant: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        self.config = config
        heads = config.heads(hidden_size) // config.num_groups
        rows = GroupRows(heads=heads, head_dim=config.head_dim, shared=2 * config.state_dim, numbers=1)
        sizes = LinearMixerConfig(
            hidden_size=hidden_size,
            num_groups=config.num_groups,
            groups_field="num_groups",
            rows=rows,
            conv_kernel=config.conv_kernel,
            conv_bias=config.use_conv_bias,
            chunk_size=config.chunk_size,
        )
        super().__init__(
            sizes,
            groups,
            norm=GatedRMSNorm(
                rows.inner,
                groups,
                rows=config.num_groups,
                epsilon=norm_epsilon,
                batch_invariant=batch_invariant,
                dtype=dtype,
                device=device,
            ),
            layer=layer,
            layers=layers,
            batch_invariant=batch_invariant,
            dtype=dtype,
            device=device,
            init=init,
        )

    def _head_parameters(self) -> tuple[str, ...]:
        return ("A_log", "D", "dt_bias")

    def _memory_shape(self) -> tuple[int, ...]:
        return (self.local_groups * self.rows.heads, self.config.head_dim, self.config.state_dim)

    def _scan(
        self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], plan: ChunkPlan, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        sizes = config.head_dim, config.state_dim
        if has_kernel(mixed) and fits_ssd(mixed, sizes):
            chunks, rates = kernel_plan(plan, mixed.dtype), -torch.exp(heads["A_log"].float())
            return fused_ssd(mixed, numbers, heads["dt_bias"], rates, heads["D"], chunks, sizes, config.dt_limits, initial)
        x, b, c = self._parts(mixed)
        dt = step_sizes(numbers.flatten(1), heads["dt_bias"], config.dt_limits)
        rates = -torch.exp(heads["A_log"].to(dt.dtype))
        return ssd_chunked(x, dt, rates, b, c, heads["D"].to(dt.dtype), plan, initial)

    def _decode_in_slots(self, channels: Tensor, numbers: Tensor, states: SlotStates) -> Tensor:
        a_log, skip, bias = (self.get_parameter(name) for name in self._head_parameters())
        return fused_ssd_decode(channels, numbers, (self.conv.weight, self.conv.bias), (a_log, skip, bias), states, self.config.dt_limits)

    def _scan_step(self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        x, b, c = self._parts(mixed)
        dt = step_sizes(numbers.flatten(1), heads["dt_bias"], self.config.dt_limits)
        rates = -torch.exp(heads["A_log"].to(dt.dtype))
        return ssd_step(x, dt, rates, b, c, heads["D"].to(dt.dtype), memory)

    def _scan_alone(self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], memory: Tensor, spans: SlotSpans) -> Tensor:
        a_log, skip, bias = (heads[name] for name in self._head_parameters())
        return fixed_ssd(mixed, numbers, (a_log, skip, bias), memory, spans, self.config.dt_limits)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H, P], b and c [T, G, N]."""
        width = self.config.state_dim
        x, b, c = mixed.split((mixed.shape[-1] - 2 * width, width, width), dim=-1)
        return x.unflatten(-1, (-1, self.config.head_dim)).flatten(1, 2), b, c
