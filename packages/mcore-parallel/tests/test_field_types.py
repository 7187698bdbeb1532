# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Values of another type than their field's are refused when a configuration is made."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from mcore_parallel import ParallelPlan, check_field_types
from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, Llama3Scaling, MambaConfig, YarnScaling

MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
LATENT: dict[str, Any] = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}


@pytest.mark.parametrize(
    ("build", "values", "message"),
    [
        (ParallelPlan, {"tp": "2"}, "tp='2' must be an integer, not str; write 2"),
        (ParallelPlan, {"dp": 2.0}, "dp=2.0 must be an integer, not float; write 2"),
        (ParallelPlan, {"tp": True}, "tp=True must be an integer, not bool"),
        (ParallelPlan, {"etp": "1"}, "etp='1' must be an integer or None, not str; write 1"),
        (ParallelPlan, {"sequence_parallel": "false"}, "sequence_parallel='false' must be True or False, not str"),
        (ParallelPlan, {"cp": 4, "hierarchical_cp": [2, 2]}, r"hierarchical_cp=\[2, 2\] must be tuple.*write \(2, 2\)"),
        (ParallelPlan, {"cp": 4, "hierarchical_cp": (2.0, 2)}, r"hierarchical_cp=\(2.0, 2\) must be tuple"),
        (TransformerConfig, {**MODEL, "num_layers": 4.0}, "num_layers=4.0 must be an integer, not float; write 4"),
        (TransformerConfig, {**MODEL, "num_layers": 4.5}, "num_layers=4.5 must be an integer, not float; write a value of that type"),
        (TransformerConfig, {**MODEL, "ffn_hidden_size": "32"}, "ffn_hidden_size='32' must be an integer or None, not str; write 32"),
        (TransformerConfig, {**MODEL, "norm_epsilon": "1e-5"}, "norm_epsilon='1e-5' must be a number, not str; write 1e-05"),
        (TransformerConfig, {**MODEL, "activation": None}, "activation=None must be text, not NoneType"),
        (TransformerConfig, {**MODEL, "mamba": {"num_groups": 2}}, "mamba={'num_groups': 2} must be MambaConfig or None, not dict"),
        (MambaConfig, {"num_groups": 8.0}, "num_groups=8.0 must be an integer"),
        (GatedDeltaNetConfig, {"num_key_heads": "2", "num_value_heads": 4}, "num_key_heads='2' must be an integer"),
        (LatentAttentionConfig, {**LATENT, "q_lora_rank": 4.0}, "q_lora_rank=4.0 must be an integer or None"),
        (YarnScaling, {"factor": "4"}, "factor='4' must be a number"),
        (Llama3Scaling, {"original_max_position_embeddings": 8192.0}, "original_max_position_embeddings=8192.0 must be an integer"),
    ],
)
def test_values_of_another_type(build: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**values)


def test_numbers_of_numpy_and_integers_for_floats_pass() -> None:
    assert ParallelPlan(tp=np.int64(2)).world_size == 2
    assert TransformerConfig(**{**MODEL, "rotary_base": 10_000}).rotary_base == 10_000
    assert TransformerConfig(**{**MODEL, "softmax_scale": np.float32(0.5)}).softmax_scale == 0.5


def test_choices_and_groups_of_fields() -> None:
    @dataclass(frozen=True)
    class Choice:
        take: Literal["a", "b"] = "a"
        sizes: tuple[int, ...] | None = None

    check_field_types(Choice(sizes=(1, 2)))
    with pytest.raises(ValueError, match="take='c' must be"):
        check_field_types(Choice(take="c"))  # type: ignore[arg-type]


def test_a_negative_mamba_head_count_is_named() -> None:
    with pytest.raises(ValueError, match="num_heads=-4 must be at least 1"):
        MambaConfig(num_heads=-4)
