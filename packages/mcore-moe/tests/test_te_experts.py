# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts by products that read sizes on the host, and rows of zeros for products in few bits: results are those without."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe import GroupedMLP, MoEConfig, MoELayer, TEGroupedMLP, get_align_size_for_quantization
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.models import Site, TransformerConfig
from mcore_parallel.nn import Step, TorchLayers

F64 = torch.float64
ALONE = ProcessGroups.single()


class HostProducts:
    """Stands for Transformer Engine's, which read the rows of each expert on the host."""

    reads_sizes = True

    def __init__(self) -> None:
        self.read = list[list[int]]()

    def matmul(self, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: Any) -> Tensor:
        self.read.append(ends_N.diff(prepend=ends_N.new_zeros(1)).tolist())
        behind = len(rows_RI) - int(ends_N[-1])
        *parts, _ = rows_RI.split([*self.read[-1], behind])
        products = [F.linear(rows, weight) for rows, weight in zip(parts, weight_NOI, strict=True)]
        return torch.cat([*products, rows_RI.new_zeros(behind, weight_NOI.shape[1])])

    def weight_changed(self) -> None: ...


class HostLayers(TorchLayers):
    """Layers of such a backend, with one recipe or none."""

    def __init__(self, recipe: Any) -> None:
        self.fp8 = None if recipe is None else Fp8Config(recipe=recipe)
        self.made: list[HostProducts] = []

    def grouped_products(self, in_features: int, out_features: int, groups: ProcessGroups) -> Any:
        self.made.append(HostProducts())
        return self.made[-1]

    def norm_linear(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("no layer of experts has one")


def gradients(experts: GroupedMLP | TEGroupedMLP, rows: Tensor, ends: Tensor, weights: Tensor) -> list[Tensor]:
    leaves = [rows.detach().requires_grad_(), weights.detach().requires_grad_(), *experts.parameters()]
    y = experts(leaves[0], ends, leaves[1])[: int(ends[-1])]
    return [y.detach(), *torch.autograd.grad((y * torch.arange(y.numel(), dtype=F64).view_as(y)).sum(), leaves)]


@pytest.mark.parametrize("counts", [(3, 0, 40, 1), (0, 0, 0, 0), (0, 5, 0, 0)], ids=str)
def test_products_on_the_host_give_what_grouped_ones_give(counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = HostLayers(None)
    ours, theirs = TEGroupedMLP(4, 8, 6, ALONE, bias=True, dtype=F64, layers=layers), GroupedMLP(4, 8, 6, ALONE, bias=True, dtype=F64)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    # Three rows behind the last expert belong to none.
    rows, weights = torch.randn(sum(counts) + 3, 8, dtype=F64), torch.rand(sum(counts) + 3, dtype=F64)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    results = [gradients(experts, rows, ends, weights) for experts in (ours, theirs, ours)]
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-11)
    assert all(torch.equal(*pair) for pair in zip(results[0], results[2], strict=True))
    # Each of two stacks, twice.
    assert [products.read for products in layers.made] == [[list(counts)] * 2] * 2


def test_layers_choose_who_computes_the_experts() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=16, ffn_hidden_size=48)
    place: dict[str, Any] = {"layer": 0, "local_layer": 0, "config": config, "groups": ALONE}
    mixture = MoEConfig(num_moe_experts=4)
    assert type(MoELayer(mixture, Site(**place, layers=HostLayers("delayed"))).experts) is TEGroupedMLP
    assert MoELayer(mixture, Site(**place, layers=HostLayers(None))).reads_device
    for layers in (TorchLayers(), choose_backend("torch", fp8=Fp8Config()).layers(0, 1)):
        assert type(MoELayer(mixture, Site(**place, layers=layers)).experts) is GroupedMLP
    with pytest.raises(ValueError, match="HostLayers take the rows of experts on the host; use TEGroupedMLP"):
        GroupedMLP(4, 8, 6, ALONE, layers=HostLayers(None))
    with pytest.raises(RuntimeError, match=r'backend="te" needs'):
        TEGroupedMLP(4, 8, 6, ALONE)


def test_layers_that_say_nothing_of_experts_are_refused_by_name() -> None:
    class DenseLayers:
        norm, column_linear, row_linear = TorchLayers.norm, TorchLayers.column_linear, TorchLayers.row_linear

    layers: Any = DenseLayers()
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=16, ffn_hidden_size=48)
    for build in (
        lambda: MoELayer(MoEConfig(num_moe_experts=4), Site(layer=0, local_layer=0, config=config, groups=ALONE, layers=layers)),
        lambda: GroupedMLP(4, 8, 6, ALONE, layers=layers),
    ):
        with pytest.raises(ValueError, match="layers=DenseLayers have no grouped_products.*return None there"):
            build()


def padded_and_plain(groups: ProcessGroups, layers: Any, dispatcher: str, tokens: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of a layer with the padding and without; tokens are fewer than a multiple."""
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=16, ffn_hidden_size=48)
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(groups.world.rank), dtype=F64)
    results: list[list[Tensor]] = []
    for pad in (True, False):
        mixture = MoEConfig(
            num_moe_experts=4,
            moe_token_dispatcher_type=dispatcher,
            moe_router_padding_for_quantization=pad,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_aux_loss_coeff=0.1,
        )
        layer = MoELayer(mixture, Site(layer=0, local_layer=0, config=config, groups=groups, layers=layers), dtype=F64)
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        leaf = x.clone().requires_grad_()
        y, aux = layer(leaf, Step.causal(1, tokens))
        assert aux is not None
        results.append([y.detach(), aux.counts[0], *torch.autograd.grad(y.square().sum() + aux.total(), [leaf, *layer.parameters()])])
    return results[0], results[1]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_padding_for_quantisation_changes_no_bit_of_a_layer_in_fp8(recipe: Any, tokens: int) -> None:
    padded, plain = padded_and_plain(ALONE, choose_backend("torch", fp8=Fp8Config(recipe=recipe)).layers(0, 1), "alltoall", tokens)
    assert all(torch.equal(*pair) for pair in zip(padded, plain, strict=True))


def test_padding_before_the_experts_spares_that_around_each_product() -> None:
    layers = HostLayers("nvfp4")
    padded, plain = padded_and_plain(ALONE, layers, "alltoall")
    torch.testing.assert_close(padded, plain, rtol=1e-11, atol=1e-11)
    # The first of each layer's is asked which experts there are.
    sizes = [size for products in layers.made[1:3] for read in products.read for size in read]
    assert len(sizes) == 2 * 4 and set(sizes) == {128}
    assert [max(products.read[0]) < 128 for products in layers.made[4:]] == [True, True]


def check_ranks(dispatcher: str) -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    # Of both ranks, of one, of none.
    for tokens in (7, groups.world.rank, 0):
        for padded, plain in zip(*padded_and_plain(groups, HostLayers("delayed"), dispatcher, tokens), strict=True):
            # Sums of other lengths round otherwise, by the size of their terms.
            torch.testing.assert_close(padded, plain, rtol=1e-11, atol=1e-13 * (1 + plain.double().norm().item()))


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_padding_behind_an_exchange(world, dispatcher: str) -> None:
    world(check_ranks, dispatcher=dispatcher)


def test_the_old_name_of_the_padding_warns_and_padding_needs_a_recipe() -> None:
    with pytest.warns(DeprecationWarning, match="moe_router_padding_for_fp8 is deprecated; set moe_router_padding_for_quantization=True"):
        mixture = MoEConfig(num_moe_experts=4, moe_router_padding_for_fp8=True)
    assert mixture.moe_router_padding_for_quantization and not mixture.moe_router_padding_for_fp8
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=16, ffn_hidden_size=48)
    with pytest.raises(ValueError, match="moe_router_padding_for_quantization=True needs a backend with an Fp8Config, found none"):
        MoELayer(mixture, Site(layer=0, local_layer=0, config=config, groups=ALONE))
    recipes: Mapping[Any, int] = {None: 0, "tensorwise": 16, "mxfp8": 32, "nvfp4": 128}
    sizes = {recipe: get_align_size_for_quantization(None if recipe is None else Fp8Config(recipe=recipe)) for recipe in recipes}
    assert sizes == dict(recipes)
