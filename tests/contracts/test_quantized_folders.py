# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model as it is published, in MXFP4 or in fp8, computes what transformers computes with its dequantised weights, in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_ckpt.hf import import_hf, load_hf
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.nn import Step
from mcore_parallel.training import model_state
from tests.parity.ours import build_model
from tests.parity.references import build, draw_batch
from tests.support.quantized_folders import write_quantized

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("mxfp4", {"hidden_size": 64, "intermediate_size": 96}),
    "deepseek3_moe": (
        "fp8", {"hidden_size": 160, "intermediate_size": 264, "moe_intermediate_size": 136, "kv_lora_rank": 130, "v_head_dim": 36},
    ),
    "qwen3": ("fp8", {"hidden_size": 160, "intermediate_size": 264, "head_dim": 36, "num_attention_heads": 4}),
}  # fmt: skip


@pytest.fixture
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Tensor, Tensor]:
    """The folder, tokens [B, S], and the logits [B * S, V] of transformers."""
    transformers = pytest.importorskip("transformers")
    method, sizes = CHANGES[request.param]
    build(request.param, **sizes).save_pretrained(tmp_path / "source")
    write_quantized(tmp_path / "source", tmp_path / "quantized", tmp_path / "twin", method)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "twin", attn_implementation="eager", dtype=torch.float32)
    tokens = draw_batch(request.param)["tokens"]
    with torch.no_grad():
        return tmp_path / "quantized", tokens, theirs.eval()(input_ids=tokens, use_cache=False).logits.flatten(0, 1)


def logits(folder: Path, tokens: Tensor, plan: ParallelPlan | None) -> Tensor:
    """Those of this rank's part of the vocabulary, of a model filled with what this rank holds."""
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    model = build_model(import_hf(folder).config, groups)
    state = model_state(model, groups)
    for parts in state.values():
        for part in parts if isinstance(parts, list) else [parts]:
            part.data.fill_(torch.nan)
    assert load_hf(folder, state) == frozenset()
    with torch.no_grad():
        return model.eval()(tokens.flatten(), Step.causal(*tokens.shape))[0].logits()


@pytest.mark.parametrize("published", CHANGES, indirect=True)
def test_one_rank_computes_what_transformers_computes(published: tuple[Path, Tensor, Tensor]) -> None:
    folder, tokens, expected = published
    ours = logits(folder, tokens, None)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("published", "cut"),
    [("gpt_oss", {"etp": 2}), ("gpt_oss", {"ep": 2, "etp": 1}), ("deepseek3_moe", {"ep": 2, "etp": 1}), ("qwen3", {})],
    indirect=["published"],
    ids=str,
)
def test_ranks_that_read_their_parts_compute_the_same(world: Any, published: tuple[Path, Tensor, Tensor], cut: dict[str, int]) -> None:
    folder, tokens, expected = published
    parts = world(logits, folder=folder, tokens=tokens, plan=ParallelPlan(tp=2, sequence_parallel=False, **cut))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
