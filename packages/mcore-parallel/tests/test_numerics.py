# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradient comparison finds mistakes and lets rounding pass."""

import math

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.numerics import check_gradient, compare_gradients, diagnose, expected_rel_bound, layer_of, precision, relative_grad_diff

CONFIG = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=2, vocab_size=32, ffn_hidden_size=24)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(groups: ProcessGroups, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of one batch, as each rank has them before anything is summed over tp."""
    model = GPTModel(CONFIG, groups, dtype=dtype, seed=1)
    tokens = torch.randint(0, 32, (64,), generator=torch.Generator().manual_seed(2))
    model(tokens, Step.causal(4, 16))[0].token_losses(tokens.roll(-1)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_bounds_are_tightest_at_the_end_and_follow_the_precision() -> None:
    bounds = [expected_rel_bound(layer, 30) for layer in range(32)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[31] == 4 * 2.0**-7 and bounds[0] == pytest.approx(4 * 1.03**31 * 2.0**-7)
    # The depth is the model's.
    assert expected_rel_bound(1, 60) > expected_rel_bound(1, 30)
    for dtype, eps in ((torch.float32, 2.0**-23), (torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7), (torch.float8_e5m2, 2.0**-7)):
        assert precision(dtype) == eps and expected_rel_bound(3, 2, dtype=dtype, factor=1.0) == eps
    names = ("embedding.weight", "layers.11.attention.qkv.weight", "final_norm.weight", "optimizer.exp_avg.layers.0.mlp.down.weight")
    assert [layer_of(name, 12) for name in names] == [0, 12, 13, 1]
    with pytest.raises(ValueError, match="layer=4 must lie between 0 and num_layers"):
        expected_rel_bound(4, 2)
    with pytest.raises(ValueError, match=r"growth=0\.0"):
        expected_rel_bound(1, 2, growth=0.0)
    with pytest.raises(ValueError, match=r"dtype=torch\.int32"):
        precision(torch.int32)


def test_differences_are_relative_to_the_reference() -> None:
    g = drawn(6, 4)
    assert relative_grad_diff(g, g.clone()) == 0.0
    assert relative_grad_diff(2 * g, g) == pytest.approx(1.0) and relative_grad_diff(g, 2 * g) == pytest.approx(0.5)
    assert relative_grad_diff(torch.zeros(3), torch.zeros(3)) == 0.0
    # Sums of squares in the gradients' own dtype would overflow.
    assert relative_grad_diff(torch.full((9,), 6e4, dtype=torch.float16), torch.full((9,), 3e4, dtype=torch.float16)) == pytest.approx(1.0)
    # A multiple of both, as the first moments are, changes nothing.
    assert relative_grad_diff(0.1 * (g + 0.01), 0.1 * g) == pytest.approx(relative_grad_diff(g + 0.01, g), rel=1e-5)
    with pytest.raises(ValueError, match=r"test has the shape \(2,\), its reference \(3,\)"):
        relative_grad_diff(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="go together"):
        relative_grad_diff(g, g, groups=ProcessGroups.single())


def test_mistakes_are_beyond_the_bound_and_named() -> None:
    g = drawn(24, 8)
    heads = g.unflatten(0, (3, 8))
    broken = g.clone()
    broken[6:12] = 0.0
    for wrong, hint in (
        (4 * g, "4 times the reference"),
        (g / 8, "0.125 times the reference"),
        (-g, "-1 times the reference"),
        (torch.zeros_like(g), "no gradient arrived"),
        (g * math.nan, "not finite"),
        (g.roll(6, 0), "parts of dim 0 come in the order [3, 0, 1, 2]"),
        (heads[[0, 2, 1]].flatten(0, 1), "3 parts of dim 0 come in the order [0, 2, 1]"),
        (g.roll(4, 1), "2 parts of dim 1 come in the order [1, 0]"),
        (broken, "of the 2 parts of dim 0 only [0] differ"),
        (drawn(24, 8, seed=9), ""),
    ):
        check = check_gradient("layers.1.mlp.up.weight", wrong, g, num_layers=2)
        assert not check.ok and hint in check.hint and (hint or not check.hint), (hint, check)
    assert check_gradient("layers.1.mlp.up.weight", g.bfloat16(), g, num_layers=2).ok
    assert diagnose(torch.ones(2), torch.zeros(2)) == "the reference is zero"


def test_the_report_has_the_worst_first() -> None:
    references = {"embedding.weight": drawn(8, 4), "layers.0.mlp.up.weight": drawn(8, 4, seed=1), "output.weight": drawn(8, 4, seed=2)}
    tests = {name: value * factor for (name, value), factor in zip(references.items(), (1.0, 1.01, 2.0), strict=True)}
    report = compare_gradients(tests, references, num_layers=1)
    assert [check.name for check in report.checks] == ["output.weight", "layers.0.mlp.up.weight", "embedding.weight"]
    assert not report.ok and report.worst.name == "output.weight"
    lines = report.table().splitlines()
    assert len(lines) == 4 and "BEYOND  2 times the reference" in lines[1] and not any("BEYOND" in line for line in lines[2:])
    tests["embedding.weight"] = tests["embedding.weight"] * math.nan
    assert compare_gradients(tests, references, num_layers=1).worst.name == "embedding.weight"
    assert compare_gradients(references, references, num_layers=1).ok
    with pytest.raises(ValueError, match=r"only one of the runs holds \['output\.weight'\]"):
        compare_gradients({k: v for k, v in tests.items() if k != "output.weight"}, references, num_layers=1)


def check_tensor_parallel() -> None:
    alone = gradients(ProcessGroups.single(), torch.bfloat16)
    for sequence_parallel in (False, True):
        groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
        specs = {shard.name: shard.spec for shard in named_shards(GPTModel(CONFIG, groups, seed=None))}
        references = {name: alone[name][spec.slices(groups)] for name, spec in specs.items()}
        raw = gradients(groups, torch.bfloat16)
        sums = {name: sum_over_tp(grad, groups) if specs[name].partial else grad for name, grad in raw.items()}
        options = {"num_layers": 3, "specs": specs, "groups": groups}
        report = compare_gradients(sums, references, **options)
        assert report.ok and report.worst.rel > 0, report.table()
        if sequence_parallel:
            # The sum over tp that norms need is left out.
            report = compare_gradients(raw, references, **options)
            assert {check.name for check in report.checks if not check.ok} == {name for name, spec in specs.items() if spec.partial}
        # One rank's part of a weight is wrong: all ranks that hold one see it.
        name = "layers.1.mlp.down.weight"
        broken = {**sums, name: sums[name] * (2 if groups.tp.rank == 1 else 1)}
        report = compare_gradients(broken, references, **options)
        assert [check.name for check in report.checks if not check.ok] == [name]
        found = relative_grad_diff(broken[name], references[name], spec=specs[name], groups=groups)
        whole = alone[name].float()
        assert found == report.worst.rel == pytest.approx((whole.chunk(2, 1)[1].norm() / whole.norm()).item(), rel=0.05)


def sum_over_tp(grad: Tensor, groups: ProcessGroups) -> Tensor:
    total = grad.clone()
    torch.distributed.all_reduce(total, group=groups.tp.pg)
    return total


@pytest.mark.world(2)
def test_sixteen_bit_gradients_agree_over_layouts_and_a_missing_sum_shows(world) -> None:
    world(check_tensor_parallel)
