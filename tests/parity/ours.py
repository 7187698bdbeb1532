# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Our model of a reference, in any layout: its logits and gradients against those of transformers."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.hf import import_hf
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import BertModel, BertOutput, GPTModel, ModelOutput, TransformerConfig
from mcore_parallel.optim import StepResult
from mcore_parallel.training import Batch, LossReport, train_step

PLANS = {
    "tp1": ParallelPlan(),
    "tp2": ParallelPlan(tp=2),
    "pp2": ParallelPlan(pp=2),
    "tp2 x cp2": ParallelPlan(tp=2, cp=2),
}
TOLERANCE = 1e-4


def transformer_config(imported: dict[str, Any]) -> TransformerConfig:
    """The config of an imported model, less what belongs to its slots and heads."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    return TransformerConfig.from_dict({name: value for name, value in imported.items() if name in known})


@dataclass
class Recorder:
    """The summed cross entropies of tokens and sentence pairs; compares the logits on its way."""

    scale: float
    """Largest logit."""
    worst: float = 0.0

    def __call__(self, output: ModelOutput | BertOutput, batch: Batch) -> LossReport:
        wanted, tp = batch.extras["logits"].flatten(0, 1), output.layer.groups.tp
        width = wanted.shape[1] // tp.size
        self._compare(output.logits(), wanted[:, tp.rank * width : (tp.rank + 1) * width])
        total = output.loss_sum(batch.labels.flatten(), batch.loss_mask.flatten())
        if "pair_logits" in batch.extras:
            assert isinstance(output, BertOutput) and output.binary_logits is not None
            self._compare(output.binary_logits, batch.extras["pair_logits"])
            total = total + output.sentence_losses(batch.extras["follows"]).sum()
        return LossReport(sum=total, count=batch.weight())

    def _compare(self, found: Tensor, wanted: Tensor) -> None:
        self.worst = max(self.worst, float((found.detach() - wanted).abs().max()) / self.scale)


class NoUpdate:
    """An optimizer that leaves everything as it is."""

    def step(self, *, grad_scale: float | Tensor, lr: float) -> StepResult:
        return StepResult(grad_norm=torch.zeros(()), skip=torch.tensor(True))


def compare(folder: str, layout: str) -> tuple[float, float]:
    """On every rank: worst error of the logits and of any gradient, relative to their scale."""
    from safetensors.torch import load_file

    groups = ProcessGroups.build(PLANS[layout]) if torch.distributed.is_initialized() else ProcessGroups.single()
    read = import_hf(Path(folder) / "weights")
    gradients = dict(import_hf(Path(folder) / "gradients").tensors)
    expected = load_file(Path(folder) / "expected.safetensors")
    model = build_model(read.config, groups)
    weights = dict(read.tensors)
    with torch.no_grad():
        for shard in named_shards(model):
            shard.parameter.copy_(weights[shard.name][shard.spec.slices(groups)])
        for buffer in named_buffer_shards(model):
            buffer.tensor.copy_(weights[buffer.name])
    tokens, labels = expected.pop("tokens"), expected.pop("labels")
    batch = Batch(tokens=tokens, labels=labels, loss_mask=torch.ones(tokens.shape), extras=expected)
    recorder = Recorder(float(expected["logits"].abs().max()))
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    train_step(model, [batch], recorder, sync, NoUpdate(), lr=0.0)
    found = sync.gradients()
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in gradients.values())
    worst = 0.0
    for shard in named_shards(model):
        wanted = gradients[shard.name]
        error = (found[shard.name] - wanted[shard.spec.slices(groups)]).abs().max()
        scaled = float(error) / max(float(wanted.abs().max()), floor)
        assert scaled < TOLERANCE, f"gradient of {shard.name} in {layout}: off by {scaled:.1e} of its scale"
        worst = max(worst, scaled)
    assert recorder.worst < TOLERANCE, f"logits in {layout}: off by {recorder.worst:.1e} of their scale"
    if layout == "tp1":
        assert weights.keys() == {item.name for item in (*named_shards(model), *named_buffer_shards(model))}
    return recorder.worst, worst


def build_model(config: dict[str, Any], groups: ProcessGroups) -> GPTModel | BertModel:
    """The model without values."""
    sizes = transformer_config(config)
    if "num_token_types" in config:
        heads = {name: config[name] for name in ("num_token_types", "add_binary_head")}
        return BertModel(sizes, groups, seed=None, **heads)
    slots = {}
    if config.get("num_moe_experts"):
        known = {field.name for field in dataclasses.fields(MoEConfig)}
        slots["feed_forward"] = moe_feed_forward(MoEConfig.from_dict({name: value for name, value in config.items() if name in known}))
    return GPTModel(sizes, groups, seed=None, **slots)
