# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""On a GPU, gradients that overwrite their sums are those that are added to zero: in GEMMs, and beside replayed blocks, which add."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.backends import Backend, choose_backend
from mcore_parallel.data_parallel import DistributedDataParallel
from mcore_parallel.graphs import CudaGraphConfig, graph_modules
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.tensor_parallel import MainGradient
from mcore_parallel.training import Batch
from tests.support.poisoned_gradients import PoisonedGradients, ZeroedGradients, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch's compiler, about itself.
    pytest.mark.filterwarnings("default"),
]
# The plain formula of attention: the others add their gradients up in any order.
CONFIG = TransformerConfig(
    num_layers=4, hidden_size=128, num_attention_heads=4, ffn_hidden_size=256, vocab_size=256, attention_backend="reference"
)
ALONE = ProcessGroups.single()
STEPS = 6


def micro_batches(model: nn.Module, step: int) -> list[Batch]:
    tokens = torch.randint(256, (3, 2, 129), generator=torch.Generator().manual_seed(step)).cuda()
    mask = torch.ones(2, 128, device="cuda")
    return [Batch(tokens=part[:, :-1].contiguous(), labels=part[:, 1:].contiguous(), loss_mask=mask) for part in tokens]


def steps(wrap: Any, *, graphs: bool = False, backend: Backend | None = None, **options: Any) -> tuple[list[Tensor], Any, Any]:
    """What ``trained`` gives, and what became of the graphs."""

    def build() -> nn.Module:
        return GPTModel(CONFIG, ALONE, backend=backend, dtype=torch.bfloat16, device="cuda", seed=3)

    graphed: list[Any] = []

    def with_graphs(ddp: DistributedDataParallel) -> Any:
        # Captured once main gradients have their places.
        if graphs:
            graphed.append(graph_modules(ddp.module, config=CudaGraphConfig(warmup_steps=4)))
        return wrap(ddp)

    tensors, sync = trained(build, ALONE, micro_batches, with_graphs, steps=STEPS, **options)
    return tensors, sync, graphed[0].report() if graphed else None


@pytest.mark.parametrize("fusion", [False, True])
def test_a_dense_model_trains_as_with_zeroed_sums(fusion: bool) -> None:
    config = {"gradient_accumulation_fusion": fusion}
    expected, _, _ = steps(ZeroedGradients, ddp=config)
    tensors, sync, _ = steps(PoisonedGradients, ddp=config)
    assert sync.least_share > 0.5
    # A GEMM that overwrites and one that adds to zero do the same sums.
    assert all(torch.equal(poisoned, zeroed) for poisoned, zeroed in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("fusion", [False, True])
def test_replayed_blocks_add_to_zero_though_others_overwrite(fusion: bool) -> None:
    """Captured in the second micro-batch of the second step; the steps before claim all sums, those after zero what graphs add to."""
    config = {"gradient_accumulation_fusion": fusion}
    expected, _, _ = steps(ZeroedGradients, graphs=True, ddp=config)
    tensors, _, report = steps(PoisonedGradients, graphs=True, ddp=config)
    assert report.graphs == CONFIG.num_layers and report.replays == (3 * STEPS - 4) * CONFIG.num_layers
    assert all(torch.equal(poisoned, zeroed) for poisoned, zeroed in zip(tensors, expected, strict=True))


def test_layers_of_transformer_engine_add_to_zero() -> None:
    pytest.importorskip("transformer_engine.pytorch")
    expected, _, _ = steps(ZeroedGradients, backend=choose_backend("te"))
    tensors, _, _ = steps(PoisonedGradients, backend=choose_backend("te"))
    assert all(torch.equal(poisoned, zeroed) for poisoned, zeroed in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 640])
def test_a_product_overwrites_a_sum_that_holds_nothing(tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    grad, x = (torch.randn(tokens, size, device="cuda", generator=generator).to(dtype) for size in (96, 64))
    claims = [True]
    total = torch.full((96, 64), torch.nan, device="cuda")
    main_grad = MainGradient(total, claim=lambda: bool(claims) and claims.pop())
    for count in (1, 2):
        main_grad.add_product(grad, x)
        torch.testing.assert_close(total.double(), count * (grad.double().T @ x.double()), rtol=1e-2, atol=1e-2)
