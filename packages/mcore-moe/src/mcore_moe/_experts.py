# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The feed-forwards of the experts that a rank holds, as stacked weights."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_moe._fp8_stack import Fp8Stack
from mcore_moe._lora import ExpertLora
from mcore_moe._stability import experimental_api
from mcore_parallel import ProcessGroups, ShardSpec
from mcore_parallel.backends import (
    BatchInvariantGroupedProducts,
    RowOrder,
    StoredGroupedProducts,
    choose_backend,
    gathered_swiglu,
    grouped_matmul,
    has_gathered_kernel,
    row_ranges,
)
from mcore_parallel.nn import Activation, LayerFactory, LayerMemory, discard_output
from mcore_parallel.tensor_parallel import GroupedProducts, LoraConfig, MainGradient

# R rows in expert order, N experts of this rank, D model, F width of an expert, W width of the activation's input (2 F with a gate).


class _StackedExperts(nn.Module):
    """``down(activation(up x))`` for every expert; N of the E experts live here.

    up is [N, 2, F, D] (gate, value), or without a gate [N, F, D]; down is [N, D, F]. With biases there are up_bias [N, 2, F] or
    [N, F], and down_bias [N, D]. With expert tensor parallelism each rank holds a slice of F, and its result is a partial sum;
    the first of these ranks adds down_bias.

    Args:
        num_experts: E.
        hidden_size: D.
        ffn_size: F.
        groups: ep and expert tensor parallelism are used.
        activation: its name, or the whole choice.
        bias: of both projections.
        memory: which saved tensors wait in host memory: "expert_fc1", the rows, and "moe_act", the input of the activation; or whether
            the output of that is dropped and recomputed ("moe_act"). None for neither.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: etp does not divide ``ffn_size``, an unknown activation, or one that stores its input in fp8 and is recomputed.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        groups: ProcessGroups,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        memory: LayerMemory | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if ffn_size % groups.expt_tp.size:
            raise ValueError(f"etp={groups.expt_tp.size} must divide the expert width {ffn_size}; lower etp or change moe_ffn_hidden_size")
        self.groups = groups
        self._main_grads: Mapping[str, MainGradient] = {}
        self.activation = Activation(name=activation) if isinstance(activation, str) else activation
        self.memory = LayerMemory() if memory is None else memory
        if "moe_act" in self.memory.recomputed and self.activation.fp8_input_store:
            raise ValueError("recompute.modules holds 'moe_act', which keeps the input that fp8_input_store=True narrows; leave one out")
        self._adds_down_bias = groups.expt_tp.is_first
        features = (2, ffn_size) if self.activation.gated else (ffn_size,)
        wide = {"ep": 0, "tp": len(features)}
        self._specs = {
            "up": ShardSpec(shape=(num_experts, *features, hidden_size), view="expert", shards=wide),
            "down": ShardSpec(shape=(num_experts, hidden_size, ffn_size), view="expert", shards={"ep": 0, "tp": 2}),
        }
        if bias:
            whole: dict[str, Any] = {"shards": {"ep": 0}, "partial": ("tp",)}
            self._specs["up_bias"] = ShardSpec(shape=(num_experts, *features), view="expert", shards=wide)
            self._specs["down_bias"] = ShardSpec(shape=(num_experts, hidden_size), view="expert", **whole)
        local = {
            name: nn.Parameter(torch.empty(spec.local_shape(groups), dtype=dtype, device=device)) for name, spec in self._specs.items()
        }
        self.up, self.down = local["up"], local["down"]
        self.up_bias, self.down_bias = local.get("up_bias"), local.get("down_bias")
        self._products: Mapping[str, GroupedProducts] = {}
        self._stored: dict[str, StoredGroupedProducts | Fp8Stack] = {}
        self._slots: dict[str, Tensor] = {}
        """Parameters with the further slots behind them, where there are some."""
        self.up_lora: ExpertLora | None = None
        self.down_lora: ExpertLora | None = None

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs

    def accumulate_weight_gradients_into(self, main_grads: Mapping[str, MainGradient]) -> None:
        """As ``mcore_parallel.tensor_parallel.WeightGradientSink``, for the two projections; those of biases go through autograd."""
        self._main_grads = {name: main_grads[name] for name in ("up", "down") if name in main_grads}

    @property
    def fp8(self) -> Mapping[str, Fp8Stack]:
        """ "up" and "down" where they are in fp8 for an engine (``store_in_fp8``); else empty."""
        return {name: stored for name, stored in self._stored.items() if isinstance(stored, Fp8Stack)}

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, or of what those in fp8 were rounded from."""
        return self.fp8["up"].dtype if self.fp8 else self.up.dtype

    def parameters_changed(self) -> None:
        """As ``mcore_parallel.tensor_parallel.WeightCopyHolder``."""
        for products in self._products.values():
            products.weight_changed()

    def _take_products(self, layers: LayerFactory | None) -> None:
        """Stacks that the layers multiply another way than ``grouped_matmul``."""
        if layers is None:
            return
        shapes = {name: getattr(self, name).flatten(1, -2).shape for name in ("up", "down")}
        chosen = {name: _grouped_products(layers, width, out, self.groups) for name, (_, out, width) in shapes.items()}
        self._products = {name: products for name, products in chosen.items() if products is not None}
        # They keep the rows in a form of their own, which no recomputation of the activation replaces.
        if self._products and not self.is_batch_invariant and "moe_act" in self.memory.recomputed:
            raise ValueError(
                f"recompute.modules holds 'moe_act', and {type(layers).__name__} multiply experts in a form of their own, which they keep; "
                "leave 'moe_act' out, or build the model without fp8 and without backend te"
            )

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the result of a row has the same bits beside any others."""
        return any(isinstance(products, BatchInvariantGroupedProducts) for products in self._products.values())

    def fp8_obstacle(self) -> str | None:
        """Why an engine cannot round the weights to fp8; None where it can, or has."""
        if self.fp8:
            return None
        if self._stored:
            return "whose experts' weights are frozen in fp8 beside adapters (LoraConfig.base_dtype); merge them into a model without it"
        if self.is_batch_invariant:
            return "whose experts have batch-invariant matmuls, of weights as they are; build the model without batch_invariant"
        if self._products:
            return "whose experts are multiplied by products of the backend; build the model with backend=None"
        if self.up.grad is not None or self.down.grad is not None:
            return "whose experts are being trained: they have gradients; serve a model of its own and load_weights"
        return "whose experts have redundant copies already; round them before" if self._slots else None

    def store_in_fp8(self, *, multiply: bool) -> None:
        """Round both stacks to e4m3, in place; what is in fp8 already stays. There is no backward behind it.

        Args:
            multiply: as of `Fp8Stack`.

        Raises:
            ValueError: ``fp8_obstacle``; they are in fp8 already, and multiplied the other way.
        """
        obstacle = self.fp8_obstacle()
        if obstacle is not None:
            raise ValueError(f"{type(self).__name__}, {obstacle}")
        if any(stack.multiply != multiply for stack in self.fp8.values()):
            raise ValueError(
                f"multiply={multiply} and the experts are in fp8 with multiply={not multiply}; use that, or build another model"
            )
        if not self.fp8:
            self._stored = {name: Fp8Stack(getattr(self, name), multiply=multiply) for name in ("up", "down")}

    def check_slots(self) -> None:
        """Whether ``add_slots`` takes these weights; nothing changes.

        Raises:
            ValueError: as of ``add_slots``.
        """
        obstacle = "whose experts have adapters; merge them into the model" if self.has_lora else None if self.fp8 else self.fp8_obstacle()
        if obstacle is not None:
            raise ValueError(f"num_redundant_experts is set, and {type(self).__name__} is a layer {obstacle}")

    @torch.no_grad()
    def add_slots(self, num_slots: int) -> list[Tensor]:
        """Let this rank hold further experts behind its own; calls to ``forward`` bring rows for all of them from now on.

        Parameters become the first part of longer stacks, and keep their names and shapes. There is no backward behind it.

        Args:
            num_slots: of the rank, its own experts included.

        Returns:
            All that belongs to an expert, each [num_slots, ...]; what is behind the own experts is not set.

        Raises:
            ValueError: the weights are being trained, have adapters, or something else multiplies them.
        """
        self.check_slots()

        def longer(values_N: Tensor) -> Tensor:
            values_S = values_N.new_empty((num_slots, *values_N.shape[1:]))
            # Bytes: fp8 has no such copy on every device.
            values_S[: len(values_N)].view(torch.uint8).copy_(values_N.contiguous().view(torch.uint8))
            return values_S

        for name, parameter in self.named_parameters(recurse=False):
            self._slots[name] = longer(parameter.detach())
            parameter.requires_grad_(False).data = self._slots[name][: len(parameter)]
        for stack in self.fp8.values():
            stack.inverse_NO1 = longer(stack.inverse_NO1)
        return [*self._slots.values(), *(stack.inverse_NO1 for stack in self.fp8.values())]

    def _held(self, name: str) -> Tensor:
        """A parameter, or the experts of all slots."""
        return self._slots[name] if name in self._slots else getattr(self, name)

    @property
    def has_lora(self) -> bool:
        """Whether the experts have adapters."""
        return self.up_lora is not None

    def add_lora(self, config: LoraConfig, seed: int) -> None:
        """Put an adapter beside each of the two stacks, as of ``mcore_parallel.tensor_parallel.LoraTarget``.

        Raises:
            ValueError: dropout, which would depend on how tokens are sent; a rank that grouped products do not take; a ``base_dtype`` of
                "fp8", or beside products of other layers; redundant copies of experts.
        """
        if self._slots:
            raise ValueError(
                "experts have redundant copies, which would have no adapters; give them to another model, and serve that merged"
            )
        if self.is_batch_invariant:
            raise ValueError("experts have batch-invariant matmuls, and an adapter none; build the model without batch_invariant")
        if config.base_dtype is not None and self._products:
            raise ValueError(
                f"base_dtype={config.base_dtype!r} computes the products of experts, and so do the layers of {type(self).__name__}; build "
                "the model without fp8 and without backend te, or leave experts out of targets"
            )
        if config.base_dtype == "fp8":
            raise ValueError(
                'base_dtype="fp8" multiplies in fp8, and experts beside adapters are multiplied in the model\'s dtype; use '
                'base_dtype="fp8_weight_only", or leave experts out of targets'
            )
        if config.dropout:
            raise ValueError(f"dropout={config.dropout} would depend on where the rows of experts lie; set it to 0, or leave experts out")

        def adapter(name: str, number: int) -> ExpertLora:
            weight: Tensor = getattr(self, name)
            return ExpertLora(config, self._specs[name], self.groups, seed=seed + number, dtype=self.dtype, device=weight.device)

        self.up_lora, self.down_lora = adapter("up", 0), adapter("down", 1)

    def quantize_base(self) -> bool:
        """As ``mcore_parallel.tensor_parallel.QuantizableLoraTarget``: e4m3 values, a scale per expert and output feature."""
        if self._stored or self.up_lora is None or self.up_lora.config.base_dtype is None:
            return False
        # Ranks that share an expert hold parts of the inputs of down.
        self._stored = {"up": StoredGroupedProducts.of(self.up), "down": StoredGroupedProducts.of(self.down, group=self.groups.expt_tp)}
        return True

    @torch.no_grad()
    def merge_lora(self) -> None:
        """Add the adapters to the weights, and remove them.

        Raises:
            ValueError: the weights are in fp8 and can take no sum.
        """
        if self._stored:
            raise ValueError("up and down are in fp8 (quantize_base); merge into a model with the weights as they were loaded")
        for weight, adapter in ((self.up, self.up_lora), (self.down, self.down_lora)):
            if adapter is not None:
                delta = adapter.delta()
                weight.copy_(weight.to(delta.dtype) + delta)
        self.up_lora = self.down_lora = None

    def forward(self, rows_RD: Tensor, ends_N: Tensor, weights_R: Tensor | None = None, order: RowOrder | None = None) -> Tensor:
        """[R, D] rows in expert order -> [R, D].

        Args:
            rows_RD: those behind the last expert belong to none; their results hold anything.
            ends_N: int32 on the rows' device, the rows of this expert and of all before it.
            weights_R: of the results of the rows; None for 1.
            order: where the rows are tokens [T, D], which the first GEMM gathers (``GroupedMLP.gathers``); None for rows as they are.

        Raises:
            ValueError: ends that fall or lie behind the rows, where the host reads them: on the CPU, and where experts are multiplied one
                by one.
        """
        if order is not None:
            assert weights_R is not None
            y_RF = gathered_swiglu(rows_RD, self.up, ends_N, weights_R, order, self._main_grads.get("up"))
            return self._multiply("down", y_RF, self.down, ends_N)
        with self.memory.offloading("expert_fc1", self):
            x_RW = self._multiply_base("up", rows_RD, self._held("up").flatten(1, -2), ends_N)
            x_RW = x_RW if self.up_lora is None else x_RW + self._low_rank(self.up_lora, rows_RD, ends_N)
            x_RW = x_RW if self.up_bias is None else x_RW + _rows_of_experts(self._held("up_bias").flatten(1), len(rows_RD), ends_N)

        def activate(x_RW: Tensor) -> Tensor:
            with self.memory.offloading("moe_act", self):
                return self.activation(x_RW, weights=weights_R, num_rows=ends_N[-1:])

        def project(y_RF: Tensor) -> Tensor:
            y_RD = self._multiply_base("down", y_RF, self._held("down"), ends_N)
            return y_RD if self.down_lora is None else y_RD + self._low_rank(self.down_lora, y_RF, ends_N)

        if "moe_act" in self.memory.recomputed:
            y_RD = discard_output(activate, project, x_RW, preserve_rng_state=False)
        else:
            y_RD = project(activate(x_RW))
        bias_ND = self._down_bias()
        if bias_ND is None:
            return y_RD
        bias_RD = _rows_of_experts(bias_ND, len(rows_RD), ends_N)
        return y_RD + (bias_RD if weights_R is None else bias_RD * weights_R.to(bias_RD.dtype).unsqueeze(-1))

    def _multiply_base(self, name: str, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
        """By one of the stacks, as it is kept."""
        stored = self._stored.get(name)
        return self._multiply(name, rows_RI, weight_NOI, ends_N) if stored is None else stored.matmul(rows_RI, weight_NOI, ends_N)

    def _multiply(self, name: str, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
        """By one matrix an expert; where the gradient of the weights goes, unless a compiler looks."""
        main_grad = None if torch.compiler.is_compiling() else self._main_grads.get(name)
        products = self._products.get(name)
        matmul = grouped_matmul if products is None else products.matmul
        return matmul(rows_RI, weight_NOI, ends_N, main_grad)

    def _low_rank(self, adapter: ExpertLora, rows_RI: Tensor, ends_N: Tensor) -> Tensor:
        low_Rr = self._multiply("A", rows_RI, adapter.A, ends_N) * adapter.config.scaling
        return self._multiply("B", low_Rr, adapter.B.flatten(1, -2), ends_N)

    def _down_bias(self) -> Tensor | None:
        """Ranks that share an expert all have a gradient, so that their sums have equal terms; only the first one adds the bias."""
        if self.down_bias is None:
            return None
        return self._held("down_bias") if self._adds_down_bias else self._held("down_bias") * 0


@experimental_api
class SequentialMLP(_StackedExperts):
    """One product an expert in every dtype; the reference."""

    def _multiply(self, name: str, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
        ranges = row_ranges(ends_N, len(rows_RI))
        parts = [F.linear(rows_RI[begin:end], weight_OI) for (begin, end), weight_OI in zip(ranges, weight_NOI, strict=True)]
        return torch.cat([*parts, rows_RI.new_zeros(len(rows_RI) - ranges[-1][1], weight_NOI.shape[1])])


@experimental_api
class GroupedMLP(_StackedExperts):
    """All experts in two grouped GEMMs (bfloat16 on a GPU, or fp8), whose weight gradients are added to the main gradients in place.

    Arguments are those of `SequentialMLP`, and one more.

    Args:
        layers: of ``mcore_parallel.backends.Backend.layers``; its fp8 recipe holds for the two stacks, not for their adapters. None for the
            dtype of the parameters.

    Raises:
        ValueError: as of `SequentialMLP`; layers whose products `TEGroupedMLP` calls, that have products of their own beside a
            recomputed activation, or that lack ``grouped_products``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        groups: ProcessGroups,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        memory: LayerMemory | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: LayerFactory | None = None,
    ) -> None:
        options: dict[str, Any] = {"activation": activation, "bias": bias, "memory": memory, "dtype": dtype, "device": device}
        super().__init__(num_experts, hidden_size, ffn_size, groups, **options)
        self._take_products(layers)
        if any(products.reads_sizes for products in self._products.values()):
            raise ValueError(f"layers={type(layers).__name__} take the rows of experts on the host; use TEGroupedMLP")

    def gathers(self, x_TD: Tensor, num_rows: int) -> bool:
        """Whether ``forward`` takes so many rows by their order, and faster so: SwiGLU as it is by default, in bfloat16 on Hopper, whose
        parts are kept for the backward, without biases and adapters."""
        plain = self.activation == Activation(name="swiglu") and self.up_bias is None and not self.has_lora
        managed = {"expert_fc1", "moe_act"} & (self.memory.recomputed | self.memory.offloaded)
        plain = plain and not managed and not self._products and not self._stored and not self._slots
        return plain and has_gathered_kernel(x_TD, self.up, num_rows)

    @property
    def is_quantized(self) -> bool:
        """Whether the stacks are multiplied in fp8."""
        return bool(self._products) and not self.is_batch_invariant


@experimental_api
class TEGroupedMLP(_StackedExperts):
    """All experts in two grouped GEMMs of Transformer Engine, which takes the rows of each expert on the host: every call waits for the
    device. Parameters are those of `GroupedMLP`.

    In fp8 and fp4 that multiplies rows in multiples of `get_align_size_for_quantization` only, so experts get rows of zeros where they
    have not so many (``moe_router_padding_for_quantization`` has done that before).

    Arguments are those of `GroupedMLP`.

    Args:
        layers: of a backend whose products take sizes on the host; None for those of ``choose_backend("te")``.

    Raises:
        ValueError: as of `GroupedMLP`.
        RuntimeError: no layers, and Transformer Engine is not installed or finds no GPU.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        groups: ProcessGroups,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        memory: LayerMemory | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: LayerFactory | None = None,
    ) -> None:
        layers = choose_backend("te").layers(0, 1) if layers is None else layers
        options: dict[str, Any] = {"activation": activation, "bias": bias, "memory": memory, "dtype": dtype, "device": device}
        super().__init__(num_experts, hidden_size, ffn_size, groups, **options)
        self._take_products(layers)


def experts_class(layers: LayerFactory, groups: ProcessGroups) -> type[GroupedMLP | TEGroupedMLP]:
    """Who computes the experts of a model with these layers."""
    products = _grouped_products(layers, 16, 16, groups)
    return TEGroupedMLP if products is not None and products.reads_sizes else GroupedMLP


def _grouped_products(layers: LayerFactory, in_features: int, out_features: int, groups: ProcessGroups) -> GroupedProducts | None:
    """As of ``LayerFactory``, which other packages implement.

    Raises:
        ValueError: layers that do not say who multiplies experts.
    """
    choose = getattr(layers, "grouped_products", None)
    if choose is None:
        raise ValueError(
            f"layers={type(layers).__name__} have no grouped_products, as of mcore_parallel.nn.LayerFactory; add it, and return None there "
            "for GEMMs in the dtype of the weights"
        )
    return choose(in_features, out_features, groups)


def _rows_of_experts(bias_NO: Tensor, num_rows: int, ends_N: Tensor) -> Tensor:
    """[N, O] -> [R, O], each row as often as its expert has rows, zeros behind them."""
    return _RowsOfExperts.apply(bias_NO, num_rows, ends_N)


class _RowsOfExperts(torch.autograd.Function):
    """The gradient of an expert is the sum over its rows in their order, in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, bias_NO: Tensor, num_rows: int, ends_N: Tensor) -> Tensor:
        ctx.save_for_backward(ends_N)
        rows_R = torch.arange(num_rows, device=bias_NO.device, dtype=ends_N.dtype)
        expert_R = torch.searchsorted(ends_N, rows_R, right=True)
        return F.pad(bias_NO, (0, 0, 0, 1))[expert_R]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ends_N,) = ctx.saved_tensors
        wide_RO = grads[0].to(torch.promote_types(torch.float32, grads[0].dtype))
        # Checks of the bounds would read them on the host.
        sums_NO = torch.segment_reduce(wide_RO, "sum", offsets=F.pad(ends_N, (1, 0)), unsafe=True)
        return sums_NO.to(grads[0].dtype), None, None
