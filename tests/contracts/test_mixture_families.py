# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture of transformers that is imported, trained on text and exported computes there what it computes here."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mcore_ckpt.hf import export_hf, import_hf
from mcore_parallel import ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, model_state, train_step
from tests.parity.ours import build_model
from tests.parity.references import REFERENCES, build

ROWS, LENGTH = 2, 32
MIXTURES = [
    name for name, reference in REFERENCES.items() if {"num_experts", "num_local_experts", "n_routed_experts"} & {*reference.config}
]


def text_batches() -> Iterator[Batch]:
    """Of a module of Python's standard library, from its beginning on."""
    tokens = torch.tensor(ByteTokenizer().tokenize(Path(argparse.__file__).read_text("utf-8")))
    for rows in tokens.split(ROWS * LENGTH + 1):
        yield Batch(tokens=rows[:-1].view(ROWS, LENGTH), labels=rows[1:].view(ROWS, LENGTH), loss_mask=torch.ones(ROWS, LENGTH))


@pytest.mark.parametrize(("steps", "fall"), [(8, 0.5), pytest.param(50, 2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_family_is_imported_trained_and_exported(name: str, steps: int, fall: float, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    build(name, vocab_size=ByteTokenizer.vocab_size).save_pretrained(tmp_path / "source")
    read = import_hf(tmp_path / "source")
    model = build_model(read.config, ProcessGroups.single())
    weights = dict(read.tensors)
    with torch.no_grad():
        for shard in named_shards(model):
            shard.parameter.copy_(weights[shard.name])
        for buffer in named_buffer_shards(model):
            buffer.tensor.copy_(weights[buffer.name])
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, model.groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2), sync, model.groups)
    text = text_batches()
    losses = [train_step(model, [next(text)], CrossEntropyObjective(), sync, optimizer, lr=1e-2).loss for _ in range(steps)]
    assert sum(losses[-3:]) / 3 < losses[0] - fall, losses
    sync.close()
    state = {name: shard.data for name, shard in model_state(model, model.groups).items()}
    changed = [name for name, tensor in state.items() if not torch.equal(tensor, weights[name])]
    assert len(changed) == len(state), sorted({*state} - {*changed})
    export_hf(state, tmp_path / "out", family=read.family, config=read.config, hf_config={"max_position_embeddings": 64})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = next(text).tokens
    with torch.no_grad():
        ours = model.eval()(tokens.flatten(), Step.causal(len(tokens), LENGTH))[0].logits()
        expected = theirs(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
