# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A layout that cannot divide a model is refused before the first tensor."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.models import BertModel, GPTModel, MambaModel, TransformerConfig, check_layout, hybrid_config
from mcore_parallel.models.eagle import EagleConfig, EagleHead
from mcore_parallel.nn import ContextParallelBuilder, GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "vocab_size": 24}
LATENT = LatentAttentionConfig(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
MAMBA, DELTA = MambaConfig(head_dim=4, num_groups=3, state_dim=4), GatedDeltaNetConfig(num_key_heads=3, num_value_heads=6)
LINEAR: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "num_layers"}

CASES = {
    "heads": (TransformerConfig(**SIZES), {"tp": 4}, "tp=4 must divide num_attention_heads=6; lower tp or change num_attention_heads"),
    "kv heads": (
        TransformerConfig(**{**SIZES, "num_attention_heads": 12, "num_query_groups": 4}),
        {"tp": 6},
        r"tp=6 must divide num_query_groups=4 \(key-value heads\) or be a multiple of it; change tp or num_query_groups",
    ),
    "norms across heads": (
        TransformerConfig(**{**SIZES, "num_query_groups": 1}, qk_layernorm=True, qk_layernorm_across_heads=True),
        {"tp": 2},
        "tp=2 must divide num_query_groups=1 with qk_layernorm_across_heads=True; lower tp",
    ),
    "shared kv rows": (
        TransformerConfig(**{**SIZES, "num_query_groups": 1, "kv_channels": 2, "num_attention_heads": 12}),
        {"tp": 3},
        r"kv_channels = 28, which that many ranks share; lower tp",
    ),
    "ffn": (TransformerConfig(**SIZES, ffn_hidden_size=32), {"tp": 3}, "tp=3 must divide ffn_hidden_size=32; lower tp or round"),
    "vocabulary": (TransformerConfig(**{**SIZES, "vocab_size": 25}), {"tp": 2}, "tp=2 must divide vocab_size=25; pad it"),
    "latent": (TransformerConfig(**SIZES, latent_attention=LATENT), {"tp": 4}, "tp=4 must divide num_attention_heads=6"),
    "mamba": (hybrid_config("M*-", **LINEAR, mamba=MAMBA), {"tp": 2}, r"tp=2 must divide mamba.num_groups=3; lower tp or change"),
    "mamba over cp": (hybrid_config("M", **LINEAR, mamba=MAMBA), {"tp": 3, "cp": 8}, "cp=8 must divide the 4 heads of a tp rank"),
    "delta net": (hybrid_config("G-", **LINEAR, delta_net=DELTA), {"tp": 2}, r"tp=2 must divide delta_net.num_key_heads=3"),
}


class NoTensors(TorchDispatchMode):
    """Fails as soon as a tensor is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} makes a tensor")


def groups_of(**degrees: int) -> ProcessGroups:
    """The groups of rank 0 of a plan that no world stands behind."""
    alone, plan = ProcessGroups.single(), ParallelPlan(**degrees)
    tp, cp = (Group(tuple(range(size)), 0) for size in (plan.tp, plan.cp))
    return dataclasses.replace(alone, plan=plan, tp=tp, cp=cp)


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_degrees_do_not_divide(name: str) -> None:
    config, degrees, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        check_layout(config, ParallelPlan(**degrees))
    build = GPTModel if config.hybrid_layer_pattern is None else MambaModel
    with NoTensors(), pytest.raises(ValueError, match=message):
        build(config, groups_of(**degrees))


def test_other_models_ask_too() -> None:
    config = TransformerConfig(**SIZES)
    with NoTensors(), pytest.raises(ValueError, match="tp=4 must divide num_attention_heads=6"):
        BertModel(config, groups_of(tp=4))
    with NoTensors(), pytest.raises(ValueError, match="tp=4 must divide num_attention_heads=6"):
        EagleHead(EagleConfig.of_target(dataclasses.replace(config, num_layers=4)), groups_of(tp=4))


def test_layers_of_their_own_are_checked() -> None:
    config = TransformerConfig(**SIZES)
    other = dataclasses.replace(config, ffn_hidden_size=33)
    with NoTensors(), pytest.raises(ValueError, match="tp=2 must divide ffn_hidden_size=33"):
        GPTModel(config, groups_of(tp=2), layer_configs={1: other})


@pytest.mark.parametrize(("name", "degrees"), [("a2a", {"cp": 4}), ("a2a", {"tp": 3, "cp": 4}), ("a2a+p2p", {"cp": 8, "levels": (4, 2)})])
def test_too_few_heads_to_exchange(name: str, degrees: dict[str, Any]) -> None:
    plan = ParallelPlan(hierarchical_cp=degrees.pop("levels", ()), **degrees)
    heads = SIZES["num_attention_heads"] // plan.tp
    with pytest.raises(ValueError, match=f"among 4 ranks, but a tp rank has num_attention_heads/tp=6/{plan.tp}={heads}; use cp_comm_type"):
        check_layout(TransformerConfig(**SIZES), plan, attention_core=ContextParallelBuilder(name))
    check_layout(TransformerConfig(**SIZES), plan, attention_core=ContextParallelBuilder("p2p"))
    check_layout(TransformerConfig(**SIZES), ParallelPlan(cp=2), attention_core=ContextParallelBuilder("a2a"))


def test_what_fits_passes() -> None:
    check_layout(TransformerConfig(**SIZES), ParallelPlan(tp=6))
    check_layout(TransformerConfig(**{**SIZES, "num_query_groups": 2}), ParallelPlan(tp=2, cp=5))
    check_layout(TransformerConfig(**{**SIZES, "num_query_groups": 1}), ParallelPlan(tp=2))
    check_layout(hybrid_config("MG*-", **LINEAR, mamba=MAMBA, delta_net=DELTA), ParallelPlan(tp=3))
    # A stack without ends divides no vocabulary; attention of one's own no heads.
    check_layout(TransformerConfig(**{**SIZES, "vocab_size": 25}), ParallelPlan(tp=2), ends=False)
    check_layout(TransformerConfig(**SIZES), ParallelPlan(tp=4), own_mixer=True)
    assert torch.get_default_dtype() == torch.float32
