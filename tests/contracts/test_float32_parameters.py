# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a layer keeps in float32 stays so under sharded training, which then has the bits of a model that serves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import MambaModel, TransformerLayer, hybrid_config
from mcore_parallel.nn import GatedDeltaNetConfig, MambaConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_tools.assembly import FullyShardedModel
from megatron_fsdp import KeepsFloat32, MixedPrecisionPolicy, fully_shard_model
from tests.contracts.conformance import mismatches

GROUPS = ProcessGroups.single()
CONFIG = hybrid_config(
    "MG*",
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    mamba=MambaConfig(num_heads=4, num_groups=2, head_dim=8, state_dim=8),
    delta_net=GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
)
FLOAT32_NAMES = {"A_log", "D", "dt_bias"}
TOKENS = torch.randint(32, (12,), generator=torch.Generator().manual_seed(1))


def build(dtype: torch.dtype, groups: ProcessGroups = GROUPS) -> MambaModel:
    model = MambaModel(CONFIG, groups, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    output, _ = model(tokens, Step.causal(1, len(tokens)))
    return output.logits()


def test_what_mixers_keep_in_float32_is_what_they_say() -> None:
    for module in MambaModel(CONFIG, GROUPS, dtype=torch.bfloat16).modules():
        own = dict(module.named_parameters(recurse=False))
        wide = {name for name, parameter in own.items() if parameter.dtype != torch.bfloat16}
        assert wide <= FLOAT32_NAMES
        assert wide == (set(module.float32_parameters()) if isinstance(module, KeepsFloat32) else set())
        assert not wide or mismatches(module, KeepsFloat32) == []


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_sharded_float32_weights_compute_in_bfloat16_as_the_engine_that_is_given_them(strategy: str) -> None:
    trained, served = build(torch.float32), MambaModel(CONFIG, GROUPS, dtype=torch.bfloat16)
    served.load_state_dict(trained.state_dict())
    model = fully_shard_model(
        trained,
        fsdp_unit_modules=[TransformerLayer],
        zero_dp_strategy=strategy,
        mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    with torch.no_grad():
        assert torch.equal(logits(model), logits(served))


def test_the_main_parameters_of_a_bfloat16_model_keep_the_digits_of_float32() -> None:
    model = build(torch.bfloat16)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    float32_names = {name for name in before if name.rsplit(".", 1)[-1] in FLOAT32_NAMES}
    assert len(float32_names) == 5
    shards = FullyShardedModel(model, GROUPS).parameter_shards()
    for name in before:
        [shard] = shards[name]
        assert shard.tensor.dtype == (torch.float32 if name in float32_names else torch.bfloat16)
        assert torch.equal(shard.tensor, before[name])


def trained(wrap: Callable[[MambaModel, ProcessGroups], Any]) -> dict[str, torch.Tensor]:
    """Weights after three updates, of which each replica has tokens of its own."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = build(torch.bfloat16, groups)
    sync = wrap(model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01, use_distributed_optimizer=True), sync, groups)
    for _ in range(3):
        sync.zero_grad_buffer()
        logits(sync, TOKENS.roll(groups.dp.rank)).float().square().mean().backward()
        sync.finish_grad_sync()
        optimizer.step(grad_scale=0.5, lr=0.01)
    if isinstance(sync, FullyShardedModel):
        [chunk] = sync.chunks
        return dict(chunk.full_state_dict())
    sync.finish_param_sync()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_updates() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    expected = trained(lambda model, groups: DistributedDataParallel(config, model, groups))
    actual = trained(FullyShardedModel)
    before = build(torch.bfloat16)
    for name, weights in expected.items():
        assert actual[name].dtype == weights.dtype
        assert torch.equal(actual[name], weights) and not torch.equal(weights, before.get_parameter(name)), name


@pytest.mark.world(2)
def test_a_sharded_bfloat16_model_is_updated_as_a_replicated_one(world: Callable[..., Any]) -> None:
    world(check_updates)
