# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Names and shapes of parameters: checkpoints are written under them, so they stay.

``golden/parameter_names.txt`` lists them; ``python packages/mcore-parallel/tests/test_parameter_names.py`` writes it anew. A line that goes
or changes makes checkpoints of earlier versions unreadable.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.models import BertModel, GPTModel, MambaModel, Site, TransformerConfig, hybrid_config, place_layers
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig
from mcore_parallel.pipeline import PipelineConfig

GOLDEN = Path(__file__).parent / "golden" / "parameter_names.txt"
ENDS: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32}
SIZES: dict[str, Any] = {"num_layers": 2, "ffn_hidden_size": 24, **ENDS}
LEARNED: dict[str, Any] = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 8}
BIASES: dict[str, Any] = {"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True, "activation": "gelu"}
LATENT = LatentAttentionConfig(q_lora_rank=6, kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5)
STATES: dict[str, Any] = {
    "mamba": MambaConfig(head_dim=4, num_groups=2, state_dim=6),
    "delta_net": GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5),
}


class Mixture(nn.Module):
    """Stands for a feed-forward from elsewhere."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.spec = ShardSpec(shape=(4, site.config.hidden_size), view="expert", shards={"ep": 0})
        self.experts = nn.Parameter(torch.empty(self.spec.local_shape(site.groups), device=site.device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"experts": self.spec}


def gpt(**options: Any) -> Callable[..., nn.Module]:
    config = TransformerConfig(**SIZES, **options)
    return lambda groups, **more: GPTModel(config, groups, device="meta", **more)


def hybrid(pattern: str, **options: Any) -> Callable[..., nn.Module]:
    config = hybrid_config(pattern, **ENDS, **options)
    return lambda groups, **more: MambaModel(config, groups, device="meta", **({"feed_forward": Mixture} if "E" in pattern else {}), **more)


def bert(**options: Any) -> Callable[..., nn.Module]:
    config = TransformerConfig(**SIZES, **BIASES, **options)
    return lambda groups, **more: BertModel(config, groups, device="meta", **more)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "gpt": gpt(),
    "gpt, grouped queries, norms of heads, biases of queries, sinks, output gate": gpt(
        num_query_groups=2, qk_layernorm=True, add_qkv_bias=True, softmax_type="learnable", attention_output_gate=True
    ),
    "gpt, tied, sandwich norms": gpt(share_embeddings_and_output_weights=True, sandwich_norm=True),
    "gpt, layer norms, biases, learned positions": gpt(**BIASES, **LEARNED),
    "gpt, latent attention": gpt(latent_attention=LATENT),
    "gpt, two further tokens": gpt(mtp_num_layers=2),
    "gpt, feed-forward from elsewhere": lambda groups: GPTModel(TransformerConfig(**SIZES), groups, feed_forward=Mixture, device="meta"),
    "hybrid": hybrid("MG*-E", ffn_hidden_size=24, **STATES),
    "hybrid, latent attention, a further token": hybrid("+M/+-", ffn_hidden_size=24, mamba=STATES["mamba"], latent_attention=LATENT),
    "bert": bert(post_norm=True, share_embeddings_and_output_weights=True, **LEARNED),
    "bert, norms before, rotary": bert(),
}


def listing() -> str:
    lines = []
    for family, build in FAMILIES.items():
        lines.append(f"[{family}]")
        lines += [f"{shard.name} {list(shard.spec.shape)}" for shard in named_shards(build(ProcessGroups.single()))]
        lines.append("")
    return "\n".join(lines)


def test_parameters_have_the_names_and_shapes_of_the_golden_list() -> None:
    assert listing() == GOLDEN.read_text(encoding="ascii")


@pytest.mark.world(2)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}], ids=str)
def test_every_layout_has_the_same_names_and_shapes(world: Any, degrees: dict[str, int]) -> None:
    expected = {family: whole_names(family) for family in FAMILIES}
    for family, whole in expected.items():
        assert len(whole) == len(set(whole)), family
    found = world(names_of_a_rank, degrees=degrees)
    for family, whole in expected.items():
        assert set().union(*(rank[family] for rank in found)) == set(whole), family


def whole_names(family: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(shard.name, shard.spec.shape) for shard in named_shards(FAMILIES[family](ProcessGroups.single()))]


def names_of_a_rank(degrees: dict[str, int]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    groups = ProcessGroups.build(ParallelPlan(**degrees))
    return {family: [(shard.name, shard.spec.shape) for shard in named_shards(build(groups))] for family, build in FAMILIES.items()}


def test_a_virtual_stage_holds_its_part_of_the_names() -> None:
    build, config = gpt(), TransformerConfig(**SIZES)
    chunks = place_layers(config, PipelineConfig(), num_stages=1, num_chunks=2).stages
    parts = [[shard.name for shard in named_shards(build(ProcessGroups.single(), layers=chunk))] for chunk in chunks]
    assert [*parts[0], *parts[1]] == [name for name, _ in whole_names("gpt")]


if __name__ == "__main__":
    GOLDEN.write_text(listing(), encoding="ascii")
