# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters learn as those of transformers and PEFT do, step by step."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcore_ckpt.hf import HFAdapterConfig, export_adapter_hf, import_hf
from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import LoraConfig, add_lora, is_adapter
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tests.support.published import write_published

STEPS, RATE, LORA = 10, 1e-2, LoraConfig(rank=4, alpha=8.0, targets=("out", "down"))


def texts(step: int) -> Tensor:
    return torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(step))


def ours(folder: Path, adapter: Path) -> list[float]:
    """Losses of the trunk; ``adapter`` gets the adapters before the first step."""
    groups = ProcessGroups.single()
    family, config, tensors = import_hf(folder)
    model = GPTModel(TransformerConfig.from_dict(config), groups, dtype=torch.float64)
    model.load_state_dict(dict(tensors))
    add_lora(model, LORA, groups)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if is_adapter(name)}
    export_adapter_hf(start, adapter, family=family, config=config, adapter=HFAdapterConfig(rank=LORA.rank, alpha=LORA.alpha))
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    rule = OptimizerConfig(lr=RATE, weight_decay=0.0, clip_grad=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8)
    optimizer = MegatronOptimizer(rule, sync, groups)
    losses = []
    for step in range(STEPS):
        tokens = texts(step)
        batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(2, 16))
        losses.append(train_step(model, [batch], CrossEntropyObjective(), sync, optimizer, lr=RATE, groups=groups).loss)
    return losses


def theirs(model: nn.Module) -> list[float]:
    """Losses of a model of transformers whose trained parameters are the adapters."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = model(texts(step), labels=texts(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Adapted(nn.Module):
    """A linear layer with two matrices beside it, written down as the paper does."""

    def __init__(self, base: nn.Linear, A: Tensor, B: Tensor) -> None:
        super().__init__()
        self.base, self.A, self.B = base, nn.Parameter(A), nn.Parameter(B)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + LORA.scaling * (x @ self.A.T @ self.B.T)


def by_hand(model: nn.Module, adapter: Path) -> nn.Module:
    from safetensors.torch import load_file

    model.requires_grad_(False)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, A in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            model.set_submodule(module, Adapted(model.get_submodule(module), A, tensors[name.replace("lora_A", "lora_B")]))
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_the_loss_falls_by_the_same_curve(tmp_path: Path, library: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_published(tmp_path / "llama", initializer_range=0.2)
    curve = ours(folder, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if library == "peft":
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * 4 * (64 + 64 + 128 + 64)
    else:
        model = by_hand(model, tmp_path / "adapter")
    expected = theirs(model)
    torch.testing.assert_close(curve, expected, rtol=1e-5, atol=0.0)
    # It is a curve.
    assert max(abs(a - b) for a, b in zip(expected, theirs_frozen(folder), strict=True)) > 0.05


def theirs_frozen(folder: Path) -> list[float]:
    """Losses of the same texts without training."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return [model(texts(step), labels=texts(step)).loss.item() for step in range(STEPS)]
