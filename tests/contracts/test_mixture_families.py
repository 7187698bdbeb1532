# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture of transformers that is imported, trained for some steps and exported computes there what it computes here."""

from pathlib import Path

import pytest
import torch

from mcore_ckpt.hf import export_hf, import_hf
from mcore_parallel import ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, model_state, train_step
from tests.parity.ours import build_model
from tests.parity.references import LENGTH, REFERENCES, build, draw_batch

MIXTURES = [
    name for name, reference in REFERENCES.items() if {"num_experts", "num_local_experts", "n_routed_experts"} & {*reference.config}
]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_family_is_imported_trained_and_exported(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    build(name).save_pretrained(tmp_path / "source")
    read = import_hf(tmp_path / "source")
    model = build_model(read.config, ProcessGroups.single())
    weights = dict(read.tensors)
    with torch.no_grad():
        for shard in named_shards(model):
            shard.parameter.copy_(weights[shard.name])
        for buffer in named_buffer_shards(model):
            buffer.tensor.copy_(weights[buffer.name])
    batch = draw_batch(name)
    tokens = batch["tokens"]
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, model.groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2), sync, model.groups)
    data = [Batch(tokens=tokens, labels=batch["labels"], loss_mask=torch.ones(tokens.shape))]
    losses = [train_step(model, data, CrossEntropyObjective(), sync, optimizer, lr=1e-2).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3
    sync.close()
    state = {name: shard.data for name, shard in model_state(model, model.groups).items()}
    changed = [name for name, tensor in state.items() if not torch.equal(tensor, weights[name])]
    assert len(changed) == len(state), sorted({*state} - {*changed})
    export_hf(state, tmp_path / "out", family=read.family, config=read.config, hf_config={"max_position_embeddings": 64})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        ours = model.eval()(tokens.flatten(), Step.causal(len(tokens), LENGTH))[0].logits()
        expected = theirs(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
