# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A draft head: its architecture file, its vocabulary, its attention over its own drafts, its published form."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.models import TransformerConfig
from mcore_parallel.models.eagle import (
    DraftRows,
    DraftVocabulary,
    EagleConfig,
    EagleHead,
    UnrolledAttention,
    load_published,
    published_architecture,
    published_config,
    published_vocabulary,
    published_weights,
)
from mcore_parallel.nn import AttentionSpec, Llama3Scaling, MambaConfig, Step

ONE = ProcessGroups.single()
TARGET = TransformerConfig(num_layers=8, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32)


def vocabulary() -> DraftVocabulary:
    return DraftVocabulary(torch.tensor([1, 2, 3, 5, 8, 13, 21, 30]), 32)


def head(**options: Any) -> EagleHead:
    config = EagleConfig.of_target(TARGET, draft_vocab_size=8)
    return EagleHead(config, ONE, vocabulary=vocabulary(), dtype=torch.float64, **options)


def test_an_architecture_goes_through_its_file(tmp_path: Path) -> None:
    scaled = dataclasses.replace(TARGET, rope_scaling=Llama3Scaling(factor=4.0), rotary_base=5e5)
    config = EagleConfig.of_target(scaled, draft_vocab_size=8)
    assert config.aux_modules == ("layers.1", "layers.3", "layers.4")
    path = tmp_path / "head.json"
    path.write_text(config.to_json(), encoding="utf-8")
    assert EagleConfig.from_json(path) == config
    assert EagleConfig.from_dict(dataclasses.asdict(config)) == config
    assert "normalization" not in json.loads(path.read_text(encoding="utf-8"))["transformer"]
    hybrid = dataclasses.replace(
        TARGET, hybrid_layer_pattern="M*-M-M*-", mamba=MambaConfig(head_dim=4, num_groups=2, state_dim=4), position_embedding_type="none"
    )
    of_hybrid = EagleConfig.of_target(hybrid)
    assert of_hybrid.transformer.mamba is None and of_hybrid.transformer.position_embedding_type == "rope"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_module": []}, "head.json: 'aux_module' is no field of EagleConfig; write 'aux_modules'"),
        ({"transformer": {"hiden_size": 8}}, "'hiden_size' is no field of TransformerConfig; write 'hidden_size'"),
        ({"aux_modules": []}, "must name one module of the target at least"),
        ({"aux_modules": "layers.1"}, "aux_modules a list of names"),
        ({"draft_vocab_size": 64}, "draft_vocab_size=64 must lie between 1 and vocab_size=32"),
        ({"transformer": {"mtp_num_layers": 1}}, "transformer.mtp_num_layers=1 is nothing that a draft head has"),
        ({"transformer": {"window_size": [4, 0]}}, r"transformer.window_size=\(4, 0\) is nothing that a draft head has"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = json.loads(EagleConfig.of_target(TARGET).to_json())
    extra = change.pop("transformer", {})
    path = tmp_path / "head.json"
    path.write_text(json.dumps({**values, **change, "transformer": {**values["transformer"], **extra}}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        EagleConfig.from_json(path)
    path.write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match="head.json: Expecting value"):
        EagleConfig.from_json(path)


def test_a_vocabulary_of_frequent_tokens() -> None:
    counts = torch.bincount(torch.tensor([7, 7, 7, 2, 2, 5, 0]), minlength=9)
    found = DraftVocabulary.from_counts(counts, 3)
    assert found.token_ids.tolist() == [0, 2, 7]
    assert (torch.arange(3) + found.d2t).tolist() == [0, 2, 7]
    assert found.t2d.nonzero().flatten().tolist() == [0, 2, 7]
    with pytest.raises(ValueError, match="draft_vocab_size=10 must lie between 1 and the 9 tokens"):
        DraftVocabulary.from_counts(counts, 10)
    with pytest.raises(ValueError, match="must be different ids in"):
        DraftVocabulary(torch.tensor([1, 1]), 4)
    with pytest.raises(ValueError, match=r"vocabulary=None .* must be \(draft_vocab_size, vocab_size\)=\(8, 32\)"):
        EagleHead(EagleConfig.of_target(TARGET, draft_vocab_size=8), ONE)


# T tokens, A heads, K key-value heads, d width of a head.
def brute_force(q: Tensor, passes: list[tuple[Tensor, Tensor]], lengths: list[int]) -> Tensor:
    """Softmax over a row of keys for each query, one at a time."""
    starts = [sum(lengths[:number]) for number, length in enumerate(lengths) for _ in range(length)]
    rows = []
    for t in range(len(q)):
        k = torch.cat([passes[0][0][starts[t] : t + 1], *(k[t : t + 1] for k, _ in passes[1:])])
        v = torch.cat([passes[0][1][starts[t] : t + 1], *(v[t : t + 1] for _, v in passes[1:])])
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        weights = torch.softmax(torch.einsum("ad,jad->aj", q[t], k) * q.shape[-1] ** -0.5, -1)
        rows.append(torch.einsum("aj,jad->ad", weights, v))
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_sees_its_text_and_its_own_drafts(packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    T, A, K, d = 6, 4, 2, 3
    lengths = [1, 3, 2] if packed else [3, 3]
    step = Step.causal(2, 3)
    if packed:
        step = dataclasses.replace(step, cu_seqlens=torch.tensor([0, 1, 4, 6]))
    spec = AttentionSpec(num_heads=A, num_kv_heads=K, head_dim=d, packed=packed, dtype=torch.float64, device="cpu")
    core: Any = UnrolledAttention().build_core(spec, ONE, 0)
    given = [torch.randn(T, heads, d, dtype=torch.float64, generator=generator).requires_grad_() for heads in (A, K, K) * 3]

    def unrolled(*given: Tensor) -> Tensor:
        at = dataclasses.replace(step, attention=DraftRows())
        return torch.cat([core(*given[first : first + 3], 0, at) for first in (0, 3, 6)])

    expected = torch.cat(
        [brute_force(given[3 * n], [(given[3 * j + 1], given[3 * j + 2]) for j in range(n + 1)], lengths) for n in range(3)]
    )
    torch.testing.assert_close(unrolled(*given), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(unrolled, given, fast_mode=True)
    # Without rows it is causal attention.
    torch.testing.assert_close(core(*given[:3], 0, step), expected[:T], rtol=1e-12, atol=1e-12)


def drafts(model: EagleHead, states: list[Tensor], table: Tensor, tokens: Tensor, num_steps: int) -> list[Tensor]:
    draft, _ = model(tokens, Step.causal(1, len(tokens)))
    return [output.logits() for output in draft.unroll(states, lambda ids: table[ids], num_steps)]


def test_unrolling_is_drafting_token_by_token() -> None:
    """What row t gives in pass k is what the head gives when its own states stand behind the text up to t."""
    model, generator = head(), torch.Generator().manual_seed(1)
    T, D, num_steps = 7, 16, 3
    tokens = torch.randint(0, 32, (T,), generator=generator)
    table = torch.randn(32, D, dtype=torch.float64, generator=generator)
    states = [torch.randn(T, D, dtype=torch.float64, generator=generator) for _ in range(3)]
    found = drafts(model, states, table, tokens, num_steps)
    for t in range(T - num_steps):
        hidden = model.fuse([x[: t + 1] for x in states])
        for number in range(num_steps):
            embedded = table[tokens[1 : t + 2 + number]]
            out = model.draft(hidden, embedded, Step.causal(1, t + 1 + number))
            torch.testing.assert_close(model.output(out).logits()[-1], found[number][t], rtol=1e-10, atol=1e-10)
            hidden = torch.cat((hidden, out[-1:]))


def test_a_published_head_is_read_again() -> None:
    model = head(seed=3)
    weights = published_weights(model)
    assert {name: tuple(x.shape) for name, x in weights.items()} == {
        "fc.weight": (16, 48),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (16, 32),
        "midlayer.self_attn.k_proj.weight": (8, 32),
        "midlayer.self_attn.v_proj.weight": (8, 32),
        "midlayer.self_attn.o_proj.weight": (16, 16),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16),
        "midlayer.mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,),
        "lm_head.weight": (8, 16),
        "d2t": (8,),
        "t2d": (32,),
    }
    # Query head 2 is the first of key-value head 1.
    assert torch.equal(weights["midlayer.self_attn.q_proj.weight"][8:12], model.get_parameter("layers.0.attention.qkv.weight")[1, :4])
    found = published_vocabulary(weights, 32)
    assert found is not None and torch.equal(found.token_ids, vocabulary().token_ids)
    other = head(seed=4)
    renamed = {name.replace("midlayer.", "layers.0."): x for name, x in weights.items()}
    load_published(other, {**renamed, "embed_tokens.weight": torch.zeros(32, 16)})
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    with pytest.raises(ValueError, match="lacks, .*norm.weight"):
        load_published(other, {name: x for name, x in weights.items() if name != "norm.weight"})
    with pytest.raises(ValueError, match="d2t is not that of the head's vocabulary"):
        load_published(other, {**weights, "d2t": weights["d2t"] + 1})
    described = published_config(model.architecture, dtype=torch.bfloat16)
    assert described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (described["draft_vocab_size"], described["head_dim"], described["torch_dtype"]) == (8, 4, "bfloat16")


@pytest.mark.parametrize("changes", [{}, {"qk_layernorm": True, "num_layers": 2, "rope_scaling": Llama3Scaling(factor=4.0)}])
@pytest.mark.parametrize("size", [8, None])
def test_the_architecture_of_a_published_head_is_read_again(changes: dict[str, Any], size: int | None) -> None:
    config = EagleConfig.of_target(TARGET, draft_vocab_size=size)
    config = dataclasses.replace(config, transformer=dataclasses.replace(config.transformer, **changes))
    model = EagleHead(config, ONE, vocabulary=None if size is None else vocabulary())
    weights, described = published_weights(model), published_config(config, dtype=torch.float32)
    again = published_architecture(described, weights)
    other = EagleHead(again, ONE, vocabulary=published_vocabulary(weights, 32), seed=9)
    load_published(other, weights)
    states, embedded = [torch.randn(4, 16) for _ in range(3)], torch.randn(4, 16)
    first, second = (each.output(each.draft(each.fuse(states), embedded, Step.causal(1, 4))).logits() for each in (model, other))
    assert torch.equal(first, second)
    across = dataclasses.replace(config.transformer, qk_layernorm=True, qk_layernorm_across_heads=True)
    with pytest.raises(ValueError, match="qk_layernorm_across_heads=True has no name in published heads"):
        published_config(dataclasses.replace(config, transformer=across), dtype=torch.float32)
    with pytest.raises(ValueError, match="has no 'rope_theta'"):
        published_architecture({name: value for name, value in described.items() if name != "rope_theta"}, weights)
    with pytest.raises(ValueError, match="hidden_act"):
        published_architecture({**described, "hidden_act": "gelu"}, weights)
    with pytest.raises(ValueError, match="rope_scaling="):
        published_architecture({**described, "rope_scaling": {"rope_type": "yarn"}}, weights)


def test_a_head_of_two_layers_drafts_too() -> None:
    config = EagleConfig.of_target(TARGET)
    config = dataclasses.replace(config, transformer=dataclasses.replace(config.transformer, num_layers=2, qk_layernorm=True))
    model = EagleHead(config, ONE, dtype=torch.float64)
    assert {"layers.1.input_layernorm.weight", "layers.1.self_attn.q_norm.weight"} <= published_weights(model).keys()
    states = [torch.randn(4, 16, dtype=torch.float64) for _ in range(3)]
    first, second = drafts(model, states, torch.randn(32, 16, dtype=torch.float64), torch.tensor([1, 2, 3, 4]), 2)
    assert first.shape == second.shape == (4, 32)
    with pytest.raises(ValueError, match="2 states do not fit aux_modules="):
        model.fuse(states[:2])
