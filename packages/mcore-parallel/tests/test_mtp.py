# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Heads that predict further tokens: what they see, what they cost, and the same in every layout."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig, place_layers
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.pipeline import PipelineConfig, PipelineLayout
from mcore_parallel.training import Batch, CrossEntropyObjective
from tests.support.layouts import Curve, check_curve, train_in

B, S, V = 2, 8, 16
PLAIN = TransformerConfig(
    num_layers=4, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, vocab_size=V, mtp_num_layers=2, init_method_std=0.3
)
TIED = dataclasses.replace(
    PLAIN, share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute", max_position_embeddings=S,
    embedding_multiplier=2.0, output_multiplier=0.5,
)  # fmt: skip
DETACHED = dataclasses.replace(TIED, mtp_detach=True)
CONFIGS = {"plain": PLAIN, "tied": TIED, "detached": DETACHED}
OBJECTIVE = CrossEntropyObjective(mtp_loss_scaling_factor=0.6)


def batch(seed: int, *, packed: bool = False) -> Batch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(B, S, dtype=torch.float64)
    mask[0, 2] = 0.0
    bounds = torch.tensor([0, 4, S, 2 * S]) if packed else None
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask, cu_seqlens=bounds)


def batches() -> list[list[Batch]]:
    return [[batch(micro, packed=micro == 1) for micro in range(2)]]


def build(groups: ProcessGroups, config: TransformerConfig, **options: Any) -> GPTModel:
    return GPTModel(config, groups, dtype=torch.float64, **options)


def curve(groups: ProcessGroups, name: str, layout: PipelineLayout) -> Curve:
    return train_in(groups, layout, functools.partial(build, config=CONFIGS[name]), batches(), OBJECTIVE)


@functools.cache
def serial(name: str) -> Curve:
    return curve(ProcessGroups.single(), name, place_layers(CONFIGS[name], PipelineConfig(), num_stages=1))


def check(degrees: dict[str, Any], expected: dict[str, Curve], pipeline: PipelineConfig) -> None:
    plan = ParallelPlan(**degrees)
    groups = ProcessGroups.build(plan)
    for name, whole in expected.items():
        layout = place_layers(CONFIGS[name], pipeline, num_stages=plan.pp, num_chunks=plan.vpp)
        check_curve(curve(groups, name, layout), whole)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        pytest.param({"tp": 2}, None, marks=pytest.mark.journey),
        ({"tp": 2, "sequence_parallel": False}, None),
        pytest.param({"cp": 2}, None, marks=pytest.mark.journey),
        ({"dp": 2}, None),
        ({"pp": 2}, "Ettt|tmmL"),
        ({"pp": 2}, "Etttt|mmL"),
        ({"pp": 2, "vpp": 2}, None),
    ],
    ids=str,
)
def test_two_ranks_train_as_one(world: Any, degrees: dict[str, Any], text: str | None) -> None:
    # What is detached does not depend on the axis: one of tensors, and stages that have depths and none.
    names = CONFIGS if text or degrees == {"tp": 2} else ("plain", "tied")
    world(check, degrees=degrees, expected={name: serial(name) for name in names}, pipeline=PipelineConfig(layout=text))


@pytest.mark.journey
@pytest.mark.world(4)
def test_four_ranks_of_two_axes_train_as_one(world: Any) -> None:
    world(check, degrees={"tp": 2, "pp": 2}, expected={name: serial(name) for name in CONFIGS}, pipeline=PipelineConfig())


def run(model: GPTModel, given: Batch) -> ModelOutput:
    output, _ = model(given.tokens.flatten(), given.step())
    assert isinstance(output, ModelOutput)
    return output


@pytest.mark.parametrize("packed", [False, True])
def test_depth_k_sees_k_tokens_further_and_no_more(packed: bool) -> None:
    model, given = build(ProcessGroups.single(), PLAIN), batch(0, packed=packed)
    place = 3  # of the first row
    before = run(model, given)
    for number, depth in enumerate(before.depths, 1):
        tokens = given.tokens.clone()
        tokens[0, place + number] = (tokens[0, place + number] + 1) % V
        after = run(model, dataclasses.replace(given, tokens=tokens)).depths[number - 1]
        changed = [not torch.equal(a, b) for a, b in zip(after.hidden[:S], depth.hidden[:S], strict=True)]
        # In a packed row the token is of the next sequence, which starts at place 4.
        assert changed[place] is (not packed)
        assert not any(changed[:place])


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_of_depth_k_is_that_of_labels_k_tokens_later(packed: bool) -> None:
    model, given = build(ProcessGroups.single(), PLAIN), batch(0, packed=packed)
    output, bounds = run(model, given), [0, 4, S, 2 * S] if packed else [0, S, 2 * S]
    report = OBJECTIVE(output, given)
    labels, mask = given.labels.flatten(), given.loss_mask.flatten()
    words = F.cross_entropy(output.logits(), labels, reduction="none")
    total = (words * mask).sum()
    torch.testing.assert_close(report.metrics["lm_loss"], total.detach())
    for number, depth in enumerate(output.depths, 1):
        losses = F.log_softmax(depth.logits(), -1)
        pairs = [(t, t + number) for begin, end in itertools.pairwise(bounds) for t in range(begin, end - number)]
        expected = sum((-losses[t, labels[u]] * mask[u] for t, u in pairs), start=torch.zeros(()))
        torch.testing.assert_close(report.metrics[f"mtp_{number}_loss"], expected.detach())
        assert report.counts[f"mtp_{number}_loss"].item() == sum(mask[u].item() for _, u in pairs)
        total = total + 0.3 * expected
    torch.testing.assert_close(report.sum, total)


def gradients(config: TransformerConfig, objective: CrossEntropyObjective) -> dict[str, Tensor]:
    model, given = build(ProcessGroups.single(), config), batch(0)
    objective(run(model, given), given).sum.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_detached_depths_train_themselves_only() -> None:
    apart, without = gradients(DETACHED, OBJECTIVE), gradients(dataclasses.replace(TIED, mtp_num_layers=0), OBJECTIVE)
    joint = gradients(TIED, OBJECTIVE)
    for name, gradient in without.items():
        torch.testing.assert_close(apart[name], gradient, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(joint[name], gradient), name
    depths = set(apart) - set(without)
    assert depths == {name for name in joint if name.startswith("mtp.")}
    # The first depth hears of the second one's loss, but not through the trunk.
    torch.testing.assert_close(apart["mtp.0.projection.weight"], joint["mtp.0.projection.weight"], rtol=1e-10, atol=1e-12)


def test_depths_run_in_training_only() -> None:
    model, given = build(ProcessGroups.single(), PLAIN), batch(0)
    assert len(run(model, given).depths) == 2
    model.eval()
    assert not run(model, given).depths
    assert OBJECTIVE(run(model, given), given).metrics == {}


def test_depths_that_run_again_give_the_same_gradients() -> None:
    given, found = batch(0), []
    for recompute in (None, RecomputeConfig(granularity="full"), RecomputeConfig(modules=("norm", "mlp"))):
        model = build(ProcessGroups.single(), PLAIN, recompute=recompute)
        OBJECTIVE(run(model, given), given).sum.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_depths_whose_ends_cannot_meet_are_an_error() -> None:
    for part in PipelineLayout.parse("Ett|ttmmL", num_stages=1).stages:
        with pytest.raises(ValueError, match="mtp_num_layers=2 need embedding and output in one chunk, or on the first and the last"):
            build(ProcessGroups.single(), PLAIN, layers=part)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_alone_gives_what_it_gives_in_training(name: str) -> None:
    model = build(ProcessGroups.single(), CONFIGS[name])
    tokens, step = torch.randint(0, V, (S,), generator=torch.Generator().manual_seed(5)), Step.causal(1, S)
    whole = model(tokens, step)[0]
    assert isinstance(whole, ModelOutput) and len(whole.depths) == 2
    model.eval()
    hidden = model.final_norm(_trunk(model, tokens, step))
    for depth, expected in enumerate(whole.depths):
        ahead = torch.cat([tokens[depth + 1 :], tokens.new_zeros(depth + 1)])
        hidden, output = model.predict_ahead(depth, hidden, ahead, step)
        torch.testing.assert_close(output.logits(), expected.logits(), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="depth=2: the model has mtp_num_layers=2"):
        model.predict_ahead(2, hidden, tokens, step)


def _trunk(model: GPTModel, tokens: Tensor, step: Step) -> Tensor:
    """[T, D] before the final norm."""
    taken: list[Tensor] = []
    hook = model.final_norm.register_forward_pre_hook(lambda _module, inputs: taken.append(inputs[0]))  # type: ignore[union-attr]
    model(tokens, step)
    hook.remove()
    return taken[0]


@pytest.mark.parametrize("factor", [-0.1, math.nan, math.inf])
def test_a_weight_of_the_heads_that_is_no_weight_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"mtp_loss_scaling_factor=.* must not be negative, and finite"):
        CrossEntropyObjective(mtp_loss_scaling_factor=factor)
