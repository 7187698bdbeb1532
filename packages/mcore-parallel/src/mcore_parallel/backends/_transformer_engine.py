# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Transformer Engine behind our layers: the only file that imports it, and imported only by who chose it.

Its modules are held as shells without parameters: the parameters, their names and shapes, their gradients and all communication between
tensor-parallel ranks stay those of our layers, and a shell is lent a view of the weight for each call.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes

from mcore_parallel.backends._align import matmul_by_sizes
from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.backends._fp8_loss import Fp8LossProducts
from mcore_parallel.backends._protocol import NormColumnLinear
from mcore_parallel.backends._quantize import MULTIPLE
from mcore_parallel.comm import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn import AttentionCore, AttentionSpec, RMSNorm, Step, TorchLayers
from mcore_parallel.tensor_parallel import (
    BorrowedGradBuffer,
    ColumnParallelLinear,
    GroupedProducts,
    MainGradient,
    Route,
    RowParallelLinear,
)

# T tokens, I input features, O output features, N experts

_RECIPES: dict[str, tuple[str, Callable[[], bool] | None]] = {
    "delayed": ("DelayedScaling", None),
    "tensorwise": ("Float8CurrentScaling", None),
    "blockwise": ("Float8BlockScaling", te.is_fp8_block_scaling_available),
    "mxfp8": ("MXFP8BlockScaling", te.is_mxfp8_available),
    "nvfp4": ("NVFP4BlockScaling", te.is_nvfp4_available),
}


class TransformerEngineBackend:
    """Norms and products by Transformer Engine; conforms to ``Backend``.

    Args:
        fp8: None for the model's dtype.

    Raises:
        ValueError: a recipe that Transformer Engine does not have, or not on this GPU.
    """

    def __init__(self, fp8: Fp8Config | None = None) -> None:
        self.fp8 = fp8
        self.recipe = None if fp8 is None else build_recipe(fp8)

    def layers(self, layer: int, num_layers: int) -> "TransformerEngineLayers":
        covered = self.fp8 is not None and self.fp8.covers(layer, num_layers)
        return TransformerEngineLayers(self.recipe, self.fp8) if covered else TransformerEngineLayers()

    def output_loss(self) -> Fp8LossProducts | None:
        return Fp8LossProducts(self.fp8) if self.fp8 is not None and self.fp8.output_layer else None

    def running(self, groups: ProcessGroups) -> AbstractContextManager[object]:
        """Delayed scaling takes stock at the end of a forward; the other recipes need nothing."""
        if self.fp8 is None or self.fp8.recipe != "delayed":
            return nullcontext()
        group = groups.tp.pg if self.fp8.reduce_amax and groups.tp.size > 1 else None
        return te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=group)


class TransformerEngineLayers:
    """The parts of one layer; conforms to ``BackendLayers``.

    Args:
        recipe: of Transformer Engine; None for the model's dtype.
        fp8: what that recipe was built of.
    """

    def __init__(self, recipe: Any = None, fp8: Fp8Config | None = None) -> None:
        self.recipe, self.fp8 = recipe, fp8

    def norm(
        self,
        size: int,
        *,
        normalization: str = "RMSNorm",
        zero_centered: bool = False,
        epsilon: float = 1e-5,
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        options: dict[str, Any] = {
            "zero_centered": zero_centered, "epsilon": epsilon, "partial": partial, "dtype": dtype, "device": device
        }  # fmt: skip
        if normalization != "RMSNorm":
            return TorchLayers().norm(size, normalization=normalization, **options)
        return _Norm(RMSNorm(size, **options), te.RMSNorm(size, eps=epsilon, zero_centered_gamma=zero_centered, dtype=dtype, device="meta"))

    def column_linear(
        self, in_features: int, out_features: int | tuple[int, ...], groups: ProcessGroups, **options: Any
    ) -> ColumnParallelLinear:
        return ColumnParallelLinear(in_features, out_features, groups, products=_Products(self.recipe), **options)

    def row_linear(self, in_features: int, out_features: int, groups: ProcessGroups, **options: Any) -> RowParallelLinear:
        return RowParallelLinear(in_features, out_features, groups, products=_Products(self.recipe), **options)

    def norm_linear(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        groups: ProcessGroups,
        *,
        shard_dim: int = 0,
        epsilon: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> NormColumnLinear:
        partial = ("tp",) if groups.sequence_parallel else ()
        norm = RMSNorm(in_features, epsilon=epsilon, partial=partial, dtype=dtype, device=device)
        linear = ColumnParallelLinear(in_features, out_features, groups, shard_dim=shard_dim, dtype=dtype, device=device, init=init)
        products = _NormProducts(norm, linear, self.recipe)
        linear.products = products
        return NormColumnLinear(norm, linear, products)

    def grouped_products(self, in_features: int, out_features: int, groups: ProcessGroups) -> GroupedProducts:
        """As of ``LayerFactory``; features that do not come in multiples of 16 keep the dtype of the weights."""
        if self.fp8 is None or in_features % MULTIPLE or out_features % MULTIPLE:
            return _Products(None)
        return _Products(self.recipe, row_multiple=self.fp8.row_multiple)


def build_recipe(fp8: Fp8Config) -> Any:
    """Transformer Engine's object for a recipe.

    Raises:
        ValueError: it has none of that name, or not on this GPU.
    """
    if fp8.recipe not in _RECIPES:
        raise ValueError(f'recipe={fp8.recipe!r} is none of Transformer Engine; use backend "torch", or one of {", ".join(_RECIPES)}')
    if not fp8.weight_gradients:
        raise ValueError('weight_gradients=False is not available with backend "te"; use "torch", or leave it True')
    name, is_available = _RECIPES[fp8.recipe]
    if is_available is not None and not is_available():
        raise ValueError(f"recipe={fp8.recipe!r} is not available on this GPU, says Transformer Engine; use 'tensorwise'")
    options: dict[str, Any] = {}
    if fp8.recipe in ("delayed", "tensorwise", "blockwise") and fp8.gradient_format is not None:
        options["fp8_format"] = recipes.Format.HYBRID if fp8.gradient_format == "e5m2" else recipes.Format.E4M3
    if fp8.recipe == "delayed":
        options["reduce_amax"] = fp8.reduce_amax
    elif fp8.reduce_amax:
        raise ValueError(f'reduce_amax=True with recipe={fp8.recipe!r} is not available with backend "te"; use backend "torch"')
    return getattr(recipes, name)(**options)


def te_attention(spec: AttentionSpec, groups: ProcessGroups) -> AttentionCore:
    """``DotProductAttention`` as an attention core, for ``choose_attention``."""
    width: Any = spec.head_dim if spec.width == spec.head_dim else (spec.head_dim, spec.width)
    mask = "causal" if spec.causal else "no_mask"
    attention = te.DotProductAttention(
        spec.num_heads,
        width,
        num_gqa_groups=spec.num_kv_heads,
        attn_mask_type=mask,
        window_size=None if spec.window is None else spec.bounds,
        softmax_scale=spec.softmax_scale,
        softmax_type=spec.softmax_type,
    )

    def core(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        if step.cu_seqlens is None:
            shape = (step.batch_size, step.seq_len)
            y = attention(*(x.unflatten(0, shape) for x in (q, k, v)), qkv_format="bshd")
        else:
            longest = int(step.cu_seqlens.diff().max())
            starts = step.cu_seqlens.to(q.device, torch.int32, non_blocking=True)
            options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": longest, "max_seqlen_kv": longest}
            packed = "padding_causal" if spec.causal else "padding"
            y = attention(q, k, v, qkv_format="thd", attn_mask_type=packed, **options)
        return y.reshape(q.shape[0], spec.num_heads, spec.width)

    return core


class _Norm(nn.Module):
    """The parameter of ``norm``, computed by a shell."""

    def __init__(self, norm: RMSNorm, shell: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        # In a tuple, for they are no modules of the model.
        self._held = norm, shell

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._held[0].shard_specs()

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: Any) -> Tensor:
        return self._held[0].initial_value(name, shape, generator, config)

    def forward(self, x: Tensor) -> Tensor:
        shell = self._held[1]
        shell._parameters["weight"] = self.weight
        return shell(x)


class _Products:
    """Products of one layer by a shell; conforms to ``LinearProducts`` and ``GroupedProducts``.

    Args:
        recipe: of Transformer Engine; None for the model's dtype.
        row_multiple: of which an expert's rows are one.
    """

    reads_sizes = True

    def __init__(self, recipe: Any, *, row_multiple: int = 1) -> None:
        self.recipe, self.row_multiple = recipe, row_multiple
        self._shell: Any = None
        self._copied: tuple[int, int] | None = None
        self._told = False

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        enter = gather_from_sequence_parallel_region if route.sequence_parallel else copy_to_tensor_model_parallel_region
        return self._product(enter(x, route.group), weight_OI, route.main_grad)

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        leave = reduce_scatter_to_sequence_parallel_region if route.sequence_parallel else reduce_from_tensor_model_parallel_region
        return leave(self._product(x_TI, weight_OI, route.main_grad), route.group)

    def matmul(self, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None) -> Tensor:
        return matmul_by_sizes(self._grouped, rows_RI, weight_NOI, ends_N, main_grad, multiple=self.row_multiple)

    def _grouped(self, rows_RI: Tensor, weight_NOI: Tensor, sizes: list[int], main_grad: MainGradient | None) -> Tensor:
        num, out, width = weight_NOI.shape
        if self._shell is None:
            shell = te.GroupedLinear(num, width, out, bias=False, params_dtype=weight_NOI.dtype, device="meta")
            self._shell = _without(shell, *(f"weight{index}" for index in range(num)))
        main_grad = _standing(main_grad)
        parts = _reporting(weight_NOI, main_grad).unbind(0)
        totals = [None] * num if main_grad is None else list(main_grad.total.view(num, out, width))
        lent = {f"weight{index}": (part, total) for index, (part, total) in enumerate(zip(parts, totals, strict=True))}
        return self._call(weight_NOI, lent, main_grad is not None, rows_RI, torch.tensor(sizes, dtype=torch.int64))

    def weight_changed(self) -> None:
        self._told, self._copied = True, None

    def _product(self, x: Tensor, weight_OI: Tensor, main_grad: MainGradient | None) -> Tensor:
        out, width = weight_OI.shape
        if self._shell is None:
            self._shell = _without(te.Linear(width, out, bias=False, params_dtype=weight_OI.dtype, device="meta"), "weight")
        main_grad = _standing(main_grad)
        return self._call(weight_OI, _lend(weight_OI, main_grad), main_grad is not None, x, narrow=_fits(x, weight_OI))

    def _call(
        self, weight: Tensor, lent: dict[str, tuple[Tensor, Tensor | None]], fuses: bool, *inputs: Tensor, narrow: bool = True
    ) -> Tensor:
        shell = self._shell
        key = (weight.data_ptr(), weight._version)
        if self._copied != key:
            shell._fp8_workspaces.clear()
            self._copied = key if self._told else None
        shell.fuse_wgrad_accumulation = fuses
        for name, (part, total) in lent.items():
            if total is not None:
                part.main_grad = total  # pyright: ignore[reportAttributeAccessIssue]
            shell.__dict__[name] = part
        # "First" would overwrite the main gradient, so it is never that: the cleared store makes new copies all the same.
        first = False if self._copied is not None else None
        try:
            with self._casting(narrow):
                return shell(*inputs, is_first_microbatch=first)
        finally:
            for name in lent:
                del shell.__dict__[name]

    def _casting(self, narrow: bool) -> AbstractContextManager[object]:
        if self.recipe is None or not narrow:
            return te.autocast(enabled=False)
        if not self.recipe.delayed():
            return te.autocast(enabled=True, recipe=self.recipe)
        if te.quantization.FP8GlobalStateManager.quantization_state.autocast_depth == 0:
            raise RuntimeError(
                "recipe='delayed' works inside `with backend.running(groups)` only, which a recomputed forward is not; "
                "use recipe='tensorwise' with recomputation"
            )
        # The one around the forward knows the group that shares scales.
        return nullcontext()


class _NormProducts(_Products):
    """A norm and the column-parallel product behind it; communicates by itself, between the two."""

    def __init__(self, norm: RMSNorm, linear: ColumnParallelLinear, recipe: Any) -> None:
        super().__init__(recipe)
        self.norm, self.linear = norm, linear

    def __call__(self, x: Tensor) -> Tensor:
        groups, weight = self.linear.groups, self.linear.weight
        weight_OI = weight.flatten(0, -2)
        out, width = weight_OI.shape
        if self._shell is None:
            tp: dict[str, Any] = {"tp_size": 1}
            if groups.tp.size > 1:
                tp = {"tp_group": groups.tp.pg, "tp_size": groups.tp.size, "sequence_parallel": groups.sequence_parallel}
            shell = te.LayerNormLinear(
                width, out * groups.tp.size, eps=self.norm.epsilon, normalization="RMSNorm", bias=False, params_dtype=weight.dtype,
                parallel_mode="column", device="meta", **tp,
            )  # fmt: skip
            self._shell = _without(shell, "weight")
        self._shell._parameters["layer_norm_weight"] = self.norm.weight
        main_grad = _standing(self.linear.route(groups).main_grad)
        return self._call(weight_OI, _lend(weight_OI, main_grad), main_grad is not None, x, narrow=_fits(x, weight_OI))


def _fits(x: Tensor, weight_OI: Tensor) -> bool:
    tokens = x.numel() // x.shape[-1]
    return tokens > 0 and tokens % MULTIPLE == 0 and weight_OI.shape[0] % MULTIPLE == 0 and weight_OI.shape[1] % MULTIPLE == 0


def _without(shell: nn.Module, *names: str) -> nn.Module:
    for name in names:
        del shell._parameters[name]
    return shell


def _standing(main_grad: MainGradient | None) -> MainGradient | None:
    """None for one whose memory a shell could not be handed before the backward; autograd has that gradient."""
    return None if isinstance(main_grad, BorrowedGradBuffer) else main_grad


def _lend(weight_OI: Tensor, main_grad: MainGradient | None) -> dict[str, tuple[Tensor, Tensor | None]]:
    total = None if main_grad is None else main_grad.total.view(weight_OI.shape)
    return {"weight": (_reporting(weight_OI, main_grad), total)}


def _reporting(weight: Tensor, main_grad: MainGradient | None) -> Tensor:
    """The weight, whose gradient a shell adds to the main gradient: who waits for it is told when that is done."""
    return weight if main_grad is None else _Report.apply(weight, main_grad)


class _Report(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: MainGradient) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.main_grad = main_grad
        # The shell adds in its backward, before this node's, so the sum must hold something by then.
        if main_grad.begin is not None:
            main_grad.begin()
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # The shell returns no gradient; this node runs when it has added its own.
        if ctx.main_grad.begin is not None:
            ctx.main_grad.begin()
        if ctx.main_grad.done is not None:
            ctx.main_grad.done()
        return None, None
