# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What Mamba-2 and the gated delta net have in common: projection, convolution, a scan over the sequence, gated norm, projection back."""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel._field_types import check_field_types
from mcore_parallel.context_parallel import SequenceSplitError
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn._factory import LayerFactory, TorchLayers
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.kernels import BoundedSequences, ChunkPlan, SlotSpans, SlotStates, fits_decode, fixed_conv, has_kernel, plan_chunks
from mcore_parallel.nn.mixers._conv import CausalConv, causal_conv, conv_step, extend
from mcore_parallel.nn.mixers._gated_norm import GatedRMSNorm
from mcore_parallel.nn.mixers._heads import GroupRows, HeadExchange, check_degrees, whole_lengths
from mcore_parallel.nn.mixers._state import RecurrentRows, RecurrentState
from mcore_parallel.tensor_parallel import aligned_rows, has_row_kernels

_LARGEST_RATE = 16.0
_STEP_SIZES = (1e-3, 0.1)
_SMALLEST_STEP_SIZE = 1e-4


@dataclass(frozen=True, kw_only=True)
class LinearMixerConfig:
    """What a ``LinearMixer`` needs to know of its subclass."""

    hidden_size: int
    num_groups: int
    groups_field: str
    """Field of the subclass's config that ``num_groups`` is, for error messages."""
    rows: GroupRows
    """Layout of one group in ``in_proj``."""
    conv_kernel: int
    """Taps of the convolution."""
    conv_bias: bool
    chunk_size: int
    """Tokens per chunk of the scan."""


# T tokens, D model, G groups, R columns of a group, P channels of a head.
class LinearMixer(nn.Module, abc.ABC):
    """A mixer whose state has one size. The subclass says what the scan does.

    ``in_proj.weight`` is [G, R, D], cut over tp by group; the columns of a group are those of ``GroupRows``.

    Args:
        sizes: D, G, R and the convolution.
        groups: tp and cp are used.
        norm: after the scan.
        layer: number among the layers of this stage, by which ``Step.states`` keeps its states.
        layers: builds the projections.
        batch_invariant: go through each sequence token after token, so that a token's bits depend on its own sequence only; with cp=1.
        dtype: of the weights; per-head parameters are float32 or wider.
        device: of the weights.
        init: draw the weights; False leaves them to a caller.

    Raises:
        HeadSplitError: tp does not divide G, cp not the heads of a tp rank.
        ValueError: ``batch_invariant`` with cp above 1.
    """

    def __init__(
        self,
        sizes: LinearMixerConfig,
        groups: ProcessGroups,
        *,
        norm: GatedRMSNorm,
        layer: int = 0,
        layers: LayerFactory | None,
        batch_invariant: bool = False,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        init: bool,
    ) -> None:
        super().__init__()
        if batch_invariant and groups.cp.size > 1:
            raise ValueError(f"batch_invariant=True goes through whole sequences, found cp={groups.cp.size}; set cp=1 or leave it out")
        self.batch_invariant = batch_invariant
        num_groups, rows = sizes.num_groups, sizes.rows
        check_degrees(num_groups, rows.heads, groups, sizes.groups_field)
        layers = TorchLayers() if layers is None else layers
        heads = num_groups * rows.heads
        self.groups, self.rows, self.chunk_size, self.layer = groups, rows, sizes.chunk_size, layer
        self.local_groups = num_groups // groups.tp.size
        self._head = ShardSpec(shape=(heads,), shards={"tp": 0})
        self._exchange = HeadExchange(rows=rows, num_groups=self.local_groups, cp=groups.cp)
        self.in_proj = layers.column_linear(sizes.hidden_size, (num_groups, rows.width), groups, dtype=dtype, device=device, init=init)
        self.conv = CausalConv(num_groups, rows.channels, sizes.conv_kernel, groups, bias=sizes.conv_bias, dtype=dtype, device=device)
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for parameter in self._head_parameters():
            self.register_parameter(parameter, nn.Parameter(torch.empty(self._head.local_shape(groups), dtype=wide, device=device)))
        self.norm = norm
        self.out_proj = layers.row_linear(heads * rows.head_dim, sizes.hidden_size, groups, dtype=dtype, device=device, init=init)
        if init:
            self.reset_parameters()

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return dict.fromkeys(self._head_parameters(), self._head)

    def float32_parameters(self) -> tuple[str, ...]:
        """Names of what there is once a head: float32 or wider whatever the dtype of the weights, under sharded training too."""
        return self._head_parameters()

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: Any) -> Tensor:
        """Rates of decay evenly from 1 to 16, step sizes from 0.001 to 0.1 evenly in their logarithm, skips of 1."""
        if name == "D":
            return torch.ones(shape)
        drawn = torch.rand(shape, generator=generator)
        if name == "A_log":
            return (1.0 + (_LARGEST_RATE - 1.0) * drawn).log()
        low, high = (math.log(size) for size in _STEP_SIZES)
        sizes = (low + (high - low) * drawn).exp().clamp(min=_SMALLEST_STEP_SIZE)
        # Inverse of the softplus.
        return sizes + torch.log(-torch.expm1(-sizes))

    def reset_parameters(self, seed: int = 0) -> None:
        """Initial values of the convolution and of what there is once a head, the same in every layout."""
        with torch.no_grad():
            for owner in (self, self.conv):
                for number, (name, spec) in enumerate(owner.shard_specs().items()):
                    parameter = owner.get_parameter(name)
                    if not parameter.is_meta:
                        generator = torch.Generator().manual_seed(seed + number)
                        parameter.copy_(owner.initial_value(name, spec.shape, generator, None)[spec.slices(self.groups)])

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> the same; each sequence of the step begins from nothing, or goes on from ``step.states`` without gradients.

        Raises:
            SequenceSplitError: sequences with another number of tokens than there are, or that cp cannot split.
            NotImplementedError: states with cp above 1.
        """
        if step.states is not None:
            return self._go_on(x, step.states)
        z, channels, numbers = self._project(x)
        lengths = whole_lengths(step, len(z), self.groups.cp.size)
        weight, bias, heads = self.conv.weight, self.conv.bias, self._heads()
        plan = plan_chunks(lengths, self.chunk_size, x.device)
        if self.batch_invariant:
            return self._finish(_TokenByToken.apply(self, plan, channels, numbers, weight, bias, *heads.values()), z)
        if self.groups.cp.size > 1:
            mixed = self._exchange.scatter(torch.cat((channels, numbers), dim=-1), lengths)
            numbers = mixed[..., self._exchange.rows.divided(self._exchange.pieces).channels :]
            channels = mixed[..., : mixed.shape[-1] - numbers.shape[-1]]
            weight, bias = self._exchange.channels(weight), None if bias is None else self._exchange.channels(bias)
            heads = {name: self._exchange.numbers(parameter) for name, parameter in heads.items()}
        y = self._scan(causal_conv(channels, weight, bias, plan.positions), numbers, heads, plan, None)[0]
        if self.groups.cp.size > 1:
            y = self._exchange.gather(y, lengths)
        return self._finish(y, z)

    @torch.no_grad()
    def prefill(self, x: Tensor, step: Step, state: RecurrentState | None = None) -> tuple[Tensor, RecurrentState]:
        """``forward`` that goes on from ``state`` and gives the state behind each sequence; without gradients.

        Args:
            x: [T or T / tp, D].
            step: says where the B sequences lie.
            state: of these B sequences, in their order; None for sequences that begin here.

        Returns:
            [T or T / tp, D], and the state of the B sequences.

        Raises:
            NotImplementedError: cp above 1.
        """
        self._check_keeps_states()
        z, channels, numbers = self._project(x)
        plan = plan_chunks(whole_lengths(step, len(z), 1), self.chunk_size, x.device)
        y, behind = self._mix_sequences(channels, numbers, plan, state)
        return self._finish(y, z), behind

    @torch.no_grad()
    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """One token of each of B sequences, without gradients.

        Args:
            x: [B or B / tp, D].
            state: before it.

        Returns:
            [B or B / tp, D], and the state behind it.
        """
        z, channels, numbers = self._project(x)
        y, behind = self._mix_tokens(channels, numbers, state)
        return self._finish(y, z), behind

    @torch.no_grad()
    def _go_on(self, x: Tensor, rows: RecurrentRows) -> Tensor:
        """[T or T / tp, D] -> the same, by the states that the rows name, which are replaced by those behind the tokens."""
        self._check_keeps_states()
        z, channels, numbers = self._project(x)
        if rows.bounded is None and rows.num_tokens != len(z):
            raise SequenceSplitError(f"step.states has rows of {rows.num_tokens} tokens and the step {len(z)}; give all of its rows")
        if self.batch_invariant:
            return self._finish(self._mix_alone(channels, numbers, rows.spans, rows.layers[self.layer]), z)
        if rows.bounded is not None:
            return self._finish(self._mix_bounded(channels, numbers, rows, rows.bounded), z)
        state, count, parts = rows.layers[self.layer], rows.num_decode, []
        if count:
            parts.append(self._decode(channels[:count], numbers[:count], state, rows))
        if rows.lengths:
            slots = rows.slots[count:]
            plan = plan_chunks(rows.lengths, self.chunk_size, x.device)
            y, behind = self._mix_sequences(channels[count:], numbers[count:], plan, state.rows(slots))
            parts.append(y)
            state.write(slots, behind)
        return self._finish(parts[0] if len(parts) == 1 else torch.cat(parts), z)

    def _mix_bounded(self, channels: Tensor, numbers: Tensor, rows: RecurrentRows, sequences: BoundedSequences) -> Tensor:
        """y [T, H, P] of a step whose lengths the device alone knows; nothing is read from it."""
        state, count = rows.layers[self.layer], rows.num_decode
        slots, plan = rows.slots[count:], sequences.plan(self.chunk_size, len(channels))
        assert plan.inside is not None
        y, behind = self._mix_sequences(channels, numbers, plan, state.rows(slots))
        state.write(slots, behind)
        # Behind no kernel stands anything for tokens of no sequence.
        y = y.masked_fill_(~plan.inside[:, None, None], 0)
        if count:
            # Of padding it is 0, as the others are of single tokens.
            y[:count] += self._decode(channels[:count], numbers[:count], state, rows)
        return y

    @property
    def has_decode_kernel(self) -> bool:
        """Whether single tokens that go on from ``step.states`` are computed by kernels, which read nothing of the host."""
        weight = self.conv.weight
        if self.batch_invariant:
            return has_row_kernels(weight)
        return has_kernel(weight) and fits_decode(self._memory_shape(), weight.shape[-1])

    def _decode(self, channels: Tensor, numbers: Tensor, state: RecurrentState, rows: RecurrentRows) -> Tensor:
        """y [B, H, P] of one token of each of the first B rows, whose states are replaced."""
        slots = rows.slots[: len(channels)]
        if self.has_decode_kernel:
            states = SlotStates(conv=state.conv, memory=state.memory, slots=slots, finished=rows.finished)
            return self._decode_in_slots(channels, numbers, states)
        y, behind = self._mix_tokens(channels, numbers, state.rows(slots))
        state.write(slots, behind)
        return y

    def _check_keeps_states(self) -> None:
        if self.groups.cp.size > 1:
            raise NotImplementedError(f"cp={self.groups.cp.size} keeps no states; build the model for inference with cp=1")

    def _mix_tokens(self, channels: Tensor, numbers: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """y [B, H, P] of one token of each of B sequences, and the states behind them."""
        if self.batch_invariant:
            tokens = torch.arange(len(channels) + 1, dtype=torch.int32, device=channels.device)
            return self._go_on_alone(channels, numbers, tokens, state)
        mixed, conv = conv_step(channels, state.conv, self.conv.weight, self.conv.bias)
        y, memory = self._scan_step(mixed, numbers, self._heads(), state.memory)
        return y, RecurrentState(conv=conv, memory=memory)

    def _mix_sequences(
        self, channels: Tensor, numbers: Tensor, plan: ChunkPlan, state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """y [T, H, P] of B sequences, and the states behind them."""
        if self.batch_invariant:
            return self._go_on_alone(channels, numbers, plan.tokens, state)
        kernel = self.conv.weight.shape[-1]
        before = channels.new_zeros(plan.num_sequences, kernel - 1, *channels.shape[1:]) if state is None else state.conv
        longer, positions, rows, conv = extend(channels, before, plan.tokens)
        mixed = causal_conv(longer, self.conv.weight, self.conv.bias, positions)[rows]
        y, memory = self._scan(mixed, numbers, self._heads(), plan, None if state is None else state.memory)
        return y, RecurrentState(conv=conv, memory=memory)

    def _go_on_alone(
        self, channels: Tensor, numbers: Tensor, tokens: Tensor, state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """y [T, H, P] of B sequences between ``tokens`` [B + 1], each as if it were alone, and the states behind them."""
        behind = self.empty_state(len(tokens) - 1) if state is None else state.copy()
        return self._mix_alone(channels, numbers, SlotSpans.in_order(tokens), behind), behind

    def _mix_alone(self, channels: Tensor, numbers: Tensor, spans: SlotSpans, state: RecurrentState) -> Tensor:
        """y [T, H, P] of sequences, token after token, each as if it were alone; their states are replaced."""
        heads, weight, bias = self._heads(), self.conv.weight, self.conv.bias
        if has_row_kernels(channels):
            weight, bias = aligned_rows(weight), None if bias is None else aligned_rows(bias)
            mixed = fixed_conv(aligned_rows(channels), (weight, bias), state.conv, spans)
            return self._scan_alone(mixed, aligned_rows(numbers), heads, state.memory, spans)
        # In memory of their own: libraries choose their way by alignment, too.
        heads = {name: parameter.clone() for name, parameter in heads.items()}
        weight, bias = weight.clone(), None if bias is None else bias.clone()
        y = channels.new_zeros(len(channels), self.local_groups * self.rows.heads, self.rows.head_dim)
        for begin, end, slot in zip(spans.begins.tolist(), spans.ends.tolist(), spans.slots.tolist(), strict=True):
            if slot < 0 or begin >= end:
                continue
            one = slice(slot, slot + 1)
            conv, memory = state.conv[one].clone(), state.memory[one].clone()
            for x, own, out in zip(channels[begin:end].split(1), numbers[begin:end].split(1), y[begin:end].split(1), strict=True):
                mixed, conv = conv_step(x.clone(memory_format=torch.contiguous_format), conv, weight, bias)
                result, memory = self._scan_step(mixed, own.clone(memory_format=torch.contiguous_format), heads, memory)
                out.copy_(result)
            state.conv[one], state.memory[one] = conv, memory
        return y

    def empty_state(self, batch_size: int) -> RecurrentState:
        """Of sequences that have not begun."""
        weight = self.conv.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        conv = weight.new_zeros(batch_size, weight.shape[-1] - 1, *weight.shape[:-1])
        return RecurrentState(conv=conv, memory=torch.zeros(batch_size, *self._memory_shape(), dtype=wide, device=weight.device))

    def _heads(self) -> dict[str, Tensor]:
        """The parameters [H] by name."""
        return {name: self.get_parameter(name) for name in self._head_parameters()}

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gates, channels of the convolution and numbers of the heads, each [T, G, ...]."""
        sizes = (self.rows.inner, self.rows.channels, self.rows.numbers * self.rows.heads)
        z, channels, numbers = self.in_proj(x).unflatten(-1, (self.local_groups, self.rows.width)).split(sizes, dim=-1)
        return z, channels, numbers

    def _finish(self, y_THP: Tensor, z_TGI: Tensor) -> Tensor:
        return self.out_proj(self.norm(y_THP.flatten(1).unflatten(1, (-1, self.norm.width)), z_TGI).flatten(1))

    @abc.abstractmethod
    def _head_parameters(self) -> tuple[str, ...]:
        """Names of the parameters [H]."""

    @abc.abstractmethod
    def _memory_shape(self) -> tuple[int, ...]:
        """Of one sequence."""

    @abc.abstractmethod
    def _scan(
        self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], plan: ChunkPlan, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """From [T, G, W] and [T, G, n h] to (y [T, H, P], states behind the sequences)."""

    @abc.abstractmethod
    def _decode_in_slots(self, channels: Tensor, numbers: Tensor, states: SlotStates) -> Tensor:
        """y [B, H, P] of one token of each of B sequences, by one kernel."""

    @abc.abstractmethod
    def _scan_step(self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """From [B, G, W] and [B, G, n h] to (y [B, H, P], the next states)."""

    @abc.abstractmethod
    def _scan_alone(self, mixed: Tensor, numbers: Tensor, heads: Mapping[str, Tensor], memory: Tensor, spans: SlotSpans) -> Tensor:
        """y [T, H, P] of sequences that go on from states in slots, by a kernel that goes from token to token."""


class _TokenByToken(torch.autograd.Function):
    """Sequences from their beginning, each as if it were alone; the backward is that of chunks, whose forward it computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        mixer: LinearMixer,
        plan: ChunkPlan,
        channels: Tensor,
        numbers: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *heads: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(channels, numbers, weight, bias, *heads)
        ctx.mixer, ctx.plan = mixer, plan
        return mixer._go_on_alone(channels, numbers, plan.tokens, None)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        inputs: list[Any] = [
            None if saved is None else saved.detach().requires_grad_(wanted)
            for saved, wanted in zip(ctx.saved_tensors, needed, strict=True)
        ]
        channels, numbers, weight, bias, *heads = inputs
        named = dict(zip(ctx.mixer._head_parameters(), heads, strict=True))
        with torch.enable_grad():
            y = ctx.mixer._scan(causal_conv(channels, weight, bias, ctx.plan.positions), numbers, named, ctx.plan, None)[0]
        found = iter(torch.autograd.grad(y, [one for one, wanted in zip(inputs, needed, strict=True) if wanted], grads[0]))
        return None, None, *(next(found) if wanted else None for wanted in needed)


def check_sizes(config: Any, *names: str) -> None:
    check_field_types(config)
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
