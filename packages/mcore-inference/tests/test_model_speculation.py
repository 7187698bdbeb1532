# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Heads propose what they would propose of the whole text, and change the number of steps only."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EagleSpeculation,
    ExecutionConfig,
    InferenceConfig,
    MtpSpeculation,
    PagedAttention,
    SamplingParams,
    StructuredOutput,
)
from mcore_inference.engine._model_drafts import ModelDrafts
from mcore_inference.speculation import DraftHeads, EagleHeads, MtpHeads
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig, hybrid_config
from mcore_parallel.models.eagle import DraftVocabulary, EagleConfig, EagleHead
from mcore_parallel.nn import LatentAttentionConfig, MambaConfig, Step

V = 32
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": V, "init_method_std": 0.3}
ONE = ProcessGroups.single()
Kind = MtpSpeculation | EagleSpeculation | None


def model_of(**changes: Any) -> GPTModel:
    config = TransformerConfig(**{"num_layers": 2, "num_query_groups": 2, **SIZES, **changes})
    return GPTModel(config, ONE, attention_core=PagedAttention(), dtype=torch.float64).eval()


def head_of(model: GPTModel, *, layers: int = 1, vocabulary: DraftVocabulary | None = None, **options: Any) -> EagleHead:
    config = EagleConfig.of_target(model.config, draft_vocab_size=None if vocabulary is None else len(vocabulary))
    config = replace(config, transformer=replace(config.transformer, num_layers=layers))
    return EagleHead(
        config, ONE, **{"vocabulary": vocabulary, "attention_core": PagedAttention(), "dtype": model.dtype, "seed": 5, **options}
    )


def build(model: GPTModel, speculation: Kind, tokenizer: Any = None, **sizes: Any) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 96, "num_blocks": 64, "block_size_tokens": 4, "max_requests": 8, "max_tokens": 64} | sizes
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**sizes))
    return DynamicInferenceEngine(model, context, tokenizer, seed=3, execution=ExecutionConfig(speculation=speculation))


def case(name: str) -> tuple[GPTModel, MtpSpeculation | EagleSpeculation]:
    """A model and heads of each kind."""
    latent = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    if name.startswith("mtp"):
        more: dict[str, Any] = {
            "mtp of one head": {"mtp_num_layers": 1},
            "mtp of three heads": {"mtp_num_layers": 3},
            "mtp, tied": {
                "mtp_num_layers": 2, "share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute",
                "max_position_embeddings": 96, "embedding_multiplier": 2.0, "output_multiplier": 0.5,
            },
            "mtp, latent": {"mtp_num_layers": 1, "latent_attention": latent, "num_query_groups": None},
        }[name]  # fmt: skip
        return model_of(**more), MtpSpeculation(num_tokens=4)
    model = model_of(num_layers=3)
    vocabulary = DraftVocabulary(torch.arange(0, V, 2), V) if "few tokens" in name else None
    return model, EagleSpeculation(head=head_of(model, layers=2 if "two layers" in name else 1, vocabulary=vocabulary), num_tokens=3)


def slow(*values: Any) -> Any:
    """Behind the others: a case whose parts each have a case of their own."""
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = ["mtp of one head", "mtp of three heads", "mtp, tied", "mtp, latent", "eagle", "eagle of two layers", "eagle of few tokens"]
QUICK = ("mtp, tied", "eagle of few tokens")


@torch.no_grad()
def drafts_of_the_whole_text(model: GPTModel, speculation: Kind, tokens: Sequence[int], count: int) -> list[int]:
    """What the heads propose behind the last token, without any cache."""
    heads: DraftHeads = EagleHeads(speculation.head, model) if isinstance(speculation, EagleSpeculation) else MtpHeads(model)
    states: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: states.__setitem__(name, output[0] if isinstance(output, tuple) else output)
        )
        for name in heads.modules
    ]
    model(torch.tensor(tokens[:-1]), Step.causal(1, len(tokens) - 1))
    for hook in hooks:
        hook.remove()
    hidden, text = heads.begin([states[name] for name in heads.modules]), list(tokens)
    out = hidden
    for number in range(1, count + 1):
        head = min(number, heads.num_heads)
        # Beyond the last head it goes on from its own states.
        hidden = out if number <= heads.num_heads else torch.cat([hidden, out[-1:]])
        ids = torch.tensor(text[head : head + len(hidden)])
        out = heads.advance(head - 1, hidden, ids, Step.causal(1, len(hidden)))
        text.append(int(heads.logits(out[-1:]).argmax()))
    return text[len(tokens) :]


@pytest.mark.parametrize(
    "name",
    [
        slow(name) if name in ("mtp of one head", "eagle") else pytest.param(name, marks=() if name in QUICK else pytest.mark.journey)
        for name in CASES
    ],
)
def test_proposals_follow_the_tokens_that_were_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, speculation = case(name)
    seen: list[tuple[list[int], list[int]]] = []
    fill = ModelDrafts.fill

    def watched(self: ModelDrafts, running: Any, granted: Any) -> None:
        fill(self, running, granted)
        for entry in running:
            assert len(entry.drafts) == granted.get(entry.record.request_id, 0)
            if entry.drafts:
                seen.append((entry.segment.prompt_tokens + entry.segment.generated_tokens, list(entry.drafts)))

    monkeypatch.setattr(ModelDrafts, "fill", watched)
    rng = random.Random(1)
    # Chunks of prompts, refused proposals, preemption, few tokens and blocks for all of it.
    engine = build(model, speculation, num_blocks=18, max_tokens=13, max_requests=4, enable_prefix_caching=False)
    prompts = [[rng.randrange(V) for _ in range(rng.randint(1, 20))] for _ in range(6)]
    engine.generate(prompts, SamplingParams(temperature=0.0, num_tokens_to_generate=16))
    assert engine.num_preemptions and engine.num_drafted > engine.num_accepted
    assert max(len(drafts) for _, drafts in seen) == engine._executor.drafts.num_tokens  # type: ignore[union-attr]
    for tokens, drafts in rng.sample(seen, 40):
        assert drafts == drafts_of_the_whole_text(model, speculation, tokens, len(drafts))


SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.3, seed=2, top_k=3),
    SamplingParams(temperature=0.5, seed=3, top_p=0.7, min_p=0.05),
    SamplingParams(temperature=0.4, seed=4, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={7: 3.0}),
    SamplingParams(temperature=0.2, min_tokens=12, stop_token_ids=(5, 9, 30)),
]


ROOMY, TIGHT = {}, {"num_blocks": 22, "max_tokens": 13}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # The least and the most of each kind where blocks and tokens are few, the others where they are not.
        slow(name, sizes)
        if (sizes is TIGHT) != (name in ("mtp of three heads", "eagle", "eagle of few tokens"))
        else pytest.param(name, sizes, marks=() if name in QUICK else pytest.mark.journey)
        for name in CASES
        for sizes in (ROOMY, TIGHT)
    ],
)
def test_every_token_and_log_prob_is_that_of_the_engine_without_proposals(name: str, sizes: dict[str, Any]) -> None:
    model, speculation = case(name)
    rng = random.Random(0)
    settings = [replace(p, num_tokens_to_generate=20, return_log_probs=True, skip_prompt_log_probs=i % 3 > 0, top_n_logprobs=2,
                        processed_log_probs=i % 2 == 1) for i, p in enumerate(SETTINGS)]  # fmt: skip
    # Beginnings that several requests share, through blocks.
    shared = [rng.randrange(V) for _ in range(9)]
    prompts = [shared + [rng.randrange(V) for _ in range(i % 4)] for i in range(len(settings))]
    plain, engine = build(model, None, **sizes), build(model, speculation, **sizes)
    for wanted, record in zip(plain.generate(prompts, settings), engine.generate(prompts, settings), strict=True):
        assert record.generated_tokens == wanted.generated_tokens and record.finish_reason is wanted.finish_reason
        assert record.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-9)
        assert (record.prompt_log_probs or []) == pytest.approx(wanted.prompt_log_probs or [], abs=1e-9)
    # Once more, with beginnings that the cache holds.
    again = [record.generated_tokens for record in engine.generate(prompts, settings)]
    assert again == [record.generated_tokens for record in plain.generate(prompts, settings)] and engine.stats()["prefix_cache_hits"]
    assert engine.num_drafted and engine.stats()["accepted_tokens"] == engine.num_accepted
    assert engine.context.allocator.total_used == 0 and engine.context.get_active_request_count() == 0


def loop_text(length: int, start: int) -> list[int]:
    """A text that says which token comes next."""
    tokens = [start % V]
    while len(tokens) < length:
        tokens.append((tokens[-1] * 5 + 7) % V)
    return tokens


@pytest.fixture(scope="module")
def trained() -> GPTModel:
    """A model with two heads that has learnt ``loop_text``."""
    torch.manual_seed(0)
    model = GPTModel(TransformerConfig(num_layers=1, mtp_num_layers=2, **{**SIZES, "init_method_std": 0.1}), ONE,
                     attention_core=PagedAttention())  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(60):
        batch = torch.tensor([loop_text(20, step * 7 + row) for row in range(8)])
        output: Any = model(batch.flatten(), Step.causal(8, 20))[0]
        loss = torch.zeros(())
        for ahead, part in enumerate((output, *output.depths), start=1):
            logits = part.logits().view(8, 20, V)[:, :-ahead]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), batch[:, ahead:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.journey
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_proposals_save_steps_with_heads_and_beyond_them(trained: GPTModel, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, num_tokens_to_generate=60)
    plain = build(trained, None)
    wanted = plain.generate([loop_text(6, 3)], params)[0].generated_tokens
    for count in (1, 2, 3):
        engine = build(trained, MtpSpeculation(num_tokens=count))
        assert engine.generate([loop_text(6, 3)], params)[0].generated_tokens == wanted
        if temperature == 0.0:
            assert wanted == loop_text(66, 3)[6:]
        # The third token comes from a head that was not trained for it.
        assert engine.num_accepted / engine.num_drafted > (0.9 if count < 3 else 0.6)
        assert engine.step_count < 66 / (1 + 0.85 * min(count, 2))
    assert MtpSpeculation().num_tokens is None and build(trained, MtpSpeculation())._executor.drafts.num_tokens == 2  # type: ignore[union-attr]


def test_a_beginning_from_the_cache_brings_the_heads_entries_along(trained: GPTModel) -> None:
    engine, prompt = build(trained, MtpSpeculation(num_tokens=2)), loop_text(21, 3)
    shares = []
    # A request that went on behind the beginning, then one that finds it, and one that finds the first one's output too.
    for text in (prompt, prompt, loop_text(50, 3)):
        drafted, accepted, hits = engine.num_drafted, engine.num_accepted, engine.stats()["prefix_cache_hits"]
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=40)
        assert engine.generate([text], params)[0].generated_tokens == loop_text(len(text) + 40, 3)[len(text) :]
        shares.append((engine.num_accepted - accepted) / (engine.num_drafted - drafted))
        assert (engine.stats()["prefix_cache_hits"] - hits >= 20) == (len(shares) > 1)
    assert min(shares) > 0.9


def test_what_ends_a_request_inside_accepted_proposals_ends_it_there(trained: GPTModel) -> None:
    prompt, text = loop_text(6, 3), loop_text(30, 3)[6:]
    assert len(set(text)) == len(text)
    engine = build(trained, MtpSpeculation(num_tokens=2), block_size_tokens=1)
    for length in range(1, 10):
        before = engine.num_accepted
        stopped = engine.generate([prompt], SamplingParams(temperature=0.0, num_tokens_to_generate=20, stop_token_ids=(text[length - 1],)))[
            0
        ]
        ended = engine.generate([prompt], SamplingParams(temperature=0.0, num_tokens_to_generate=length))[0]
        assert stopped.generated_tokens == ended.generated_tokens == text[:length]
        assert (stopped.finish_reason.value, ended.finish_reason.value) == ("stop", "length")  # type: ignore[union-attr]
        # Both ends fall on each place of a step in turn.
        assert engine.num_accepted > before or length < 3
        assert engine.context.allocator.total_used == 0
    number = engine.add_request(prompt, SamplingParams(temperature=0.0, num_tokens_to_generate=40))
    while not engine.num_accepted or len(engine.get_request(number).generated_tokens) < 9:
        engine.step()
    assert engine.abort(number) is not None and engine.context.allocator.total_used == 0
    assert engine.generate([prompt], SamplingParams(temperature=0.0, num_tokens_to_generate=9))[0].generated_tokens == text[:9]


@pytest.mark.parametrize("name", ["mtp of one head", pytest.param("eagle of few tokens", marks=pytest.mark.journey)])
def test_sampled_tokens_have_the_distribution_of_the_model(name: str) -> None:
    model, speculation = case(name)
    prompt, count, draws = [1, 2, 3], 2, 800
    engine = build(model, speculation, max_requests=64, max_tokens=512, num_blocks=512)
    params = [SamplingParams(temperature=3.0, top_k=6, seed=seed, num_tokens_to_generate=count + 1) for seed in range(draws)]
    tokens = [record.generated_tokens for record in engine.generate([prompt] * draws, params)]
    assert engine.num_drafted >= draws / 2 and 0 < engine.num_accepted < engine.num_drafted
    # The second token, which was proposed, given each first one.
    first = max({row[0] for row in tokens}, key=[row[0] for row in tokens].count)
    seen = torch.bincount(torch.tensor([row[1] for row in tokens if row[0] == first]), minlength=V).double()
    with torch.no_grad():
        logits = model(torch.tensor([*prompt, first]), Step.causal(1, 4))[0].logits()[-1] / 3.0  # type: ignore[union-attr]
    best = logits.topk(6)
    expected = torch.zeros(V, dtype=torch.float64).index_copy_(0, best.indices, best.values.softmax(-1)) * seen.sum()
    assert seen[expected == 0].sum() == 0 and seen.sum() > 100
    chi_square = float(((seen - expected)[best.indices] ** 2 / expected[best.indices]).sum())
    # 5 degrees of freedom: above 20.5 once in a thousand.
    assert chi_square < 20.5


@pytest.mark.journey
@pytest.mark.parametrize("name", ["mtp of three heads", "eagle"])
def test_a_storm_of_requests_aborts_suspends_and_loads_leaks_nothing(name: str) -> None:
    rng = random.Random(2)
    model, speculation = case(name)
    engine = build(model, speculation, num_blocks=20, max_tokens=12, max_requests=5, max_sequence_length=48)
    alone = build(model, None, max_sequence_length=48)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    asked, ended = {}, []
    for turn in range(56):
        if rng.random() < 0.4:
            params = SamplingParams(temperature=rng.choice([0, 0.2]), seed=rng.randrange(9), num_tokens_to_generate=rng.randint(0, 12))
            prompt = [rng.randrange(V) for _ in range(rng.randint(1, 12))]
            asked[engine.add_request(prompt, params)] = prompt, params
        if rng.random() < 0.1 and asked and engine.abort(number := rng.choice(sorted(asked))) is not None:
            del asked[number]
        if rng.random() < 0.05:
            engine.suspend()
            engine.resume()
        if turn % 30 == 20:
            engine.load_weights(weights.items(), in_flight=rng.choice(["recompute", "keep"]))
        ended += engine.step()
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert sorted(record.request_id for record in ended) == sorted(asked)
    for record in ended:
        assert record.generated_tokens == alone.generate(*([value] for value in asked[record.request_id]))[0].generated_tokens
    assert engine.context.allocator.total_used == 0 and engine.num_drafted


def test_pages_of_heads_go_with_their_engine() -> None:
    """Engines come and go over one context, and some are refused."""
    model = model_of(mtp_num_layers=1)
    first = build(model, MtpSpeculation())
    context, prompts = first.context, [[1, 2, 3], [4, 5]]
    params = SamplingParams(temperature=0, num_tokens_to_generate=8)
    wanted = [record.generated_tokens for record in build(model, None).generate(prompts, params)]

    def held() -> list[int]:
        """Bytes of the cache, and of pages of heads."""
        return [tensor.untyped_storage().size() for tensor in context.memory._tensors]

    cache, pages = held()
    assert cache == context.cache.num_bytes and pages == cache // 2
    refused = ExecutionConfig(speculation=MtpSpeculation(), use_cuda_graphs_for_non_decode_steps=True)
    for _ in range(3):
        with pytest.raises(ValueError, match="use_cuda_graphs_for_non_decode_steps=True"):
            DynamicInferenceEngine(model, context, execution=refused)
        assert held() == [cache, pages]
        assert [record.generated_tokens for record in first.generate(prompts, params)] == wanted and first.num_drafted
    kinds: list[tuple[Kind, list[int]]] = [
        (MtpSpeculation(num_tokens=2), [pages]), (EagleSpeculation(head=head_of(model, layers=2)), [2 * pages]), (None, []),
        (MtpSpeculation(), [pages]),
    ]  # fmt: skip
    for kind, more in kinds:
        engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(speculation=kind))
        assert held() == [cache, *more]
        assert [record.generated_tokens for record in engine.generate(prompts, params)] == wanted
        engine.suspend()
        assert sum(held()) == 0
        engine.resume()
        assert held() == [cache, *more]
    engine.close()
    with pytest.raises(RuntimeError, match="was given to another one"):
        first.add_request([1])


def test_forms_and_text_go_with_heads() -> None:
    model, tokenizer = model_of(vocab_size=272, mtp_num_layers=1), ByteTokenizer()
    letters = dict.fromkeys(tokenizer.tokenize("ab"), 100.0)
    settings = [SamplingParams(seed=seed, num_tokens_to_generate=30, logit_bias=letters, stop_words=["abba", "bbbb"]) for seed in range(3)]
    settings.append(SamplingParams(seed=1, num_tokens_to_generate=30, structured_output=StructuredOutput(regex="(ab){6}")))
    plain, engine = build(model, None, tokenizer), build(model, MtpSpeculation(num_tokens=2), tokenizer)
    for wanted, record in zip(plain.generate(["abab"] * 4, settings), engine.generate(["abab"] * 4, settings), strict=True):
        assert (record.generated_text, record.generated_tokens) == (wanted.generated_text, wanted.generated_tokens)
    assert record.generated_text == "ab" * 6 and engine.num_drafted


def test_what_cannot_go_together_is_refused_by_name() -> None:
    model = model_of(mtp_num_layers=1)
    for bad in ({"num_tokens": 0}, {"num_tokens": 65}, {"num_tokens": True}):
        with pytest.raises(ValueError, match="num_tokens"):
            MtpSpeculation(**bad)
        with pytest.raises(ValueError, match="num_tokens"):
            EagleSpeculation(head=head_of(model), **bad)
    with pytest.raises(ValueError, match="head is a GPTModel"):
        EagleSpeculation(head=model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="run_ahead=True and speculation"):
        ExecutionConfig(run_ahead=True, speculation=MtpSpeculation())
    with pytest.raises(ValueError, match="mtp_num_layers=0"):
        build(model_of(), MtpSpeculation())
    with pytest.raises(ValueError, match="core of a draft head is"):
        build(model, EagleSpeculation(head=head_of(model, attention_core=None)))
    with pytest.raises(ValueError, match="dtype=torch.float32 and the model torch.float64"):
        build(model, EagleSpeculation(head=head_of(model, dtype=torch.float32)))
    with pytest.raises(ValueError, match="hidden_size=16 and the model 32"):
        build(model, EagleSpeculation(head=head_of(model_of(hidden_size=16))))
    deeper = head_of(model_of(num_layers=8))
    with pytest.raises(ValueError, match="no module 'layers.3'"):
        build(model, EagleSpeculation(head=deeper))
    hybrid = GPTModel(hybrid_config("M*-", mamba=MambaConfig(head_dim=16, num_groups=2, state_dim=4, chunk_size=4), **SIZES), ONE,
                      attention_core=PagedAttention()).eval()  # fmt: skip
    with pytest.raises(ValueError, match="recurrent states"):
        build(hybrid, MtpSpeculation())
    plain = model_of()
    exact = GPTModel(
        plain.config, ONE, attention_core=PagedAttention(), backend=choose_backend("torch", batch_invariant=True), dtype=torch.float64
    )
    with pytest.raises(ValueError, match="EagleSpeculation and batch_invariant=True"):
        build(exact.eval(), EagleSpeculation(head=head_of(plain)))


def check_split_heads() -> list[list[int]]:
    rng, config = random.Random(4), TransformerConfig(num_layers=2, num_query_groups=2, mtp_num_layers=2, **SIZES)
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    tokens, prompts = [], [[rng.randrange(V) for _ in range(size)] for size in (1, 9, 17)]
    for speculate in (lambda model: MtpSpeculation(num_tokens=3), lambda model: EagleSpeculation(head=few_tokens(model))):
        records = []
        for layout in (groups, ONE):
            model = GPTModel(config, layout, attention_core=PagedAttention(), dtype=torch.float64).eval()
            engine = build(model, speculate(model), num_blocks=20, max_tokens=12, max_requests=4)
            params = [SamplingParams(temperature=float(i), seed=i, num_tokens_to_generate=14, return_log_probs=True) for i in range(3)]
            records.append((engine.generate(prompts, params), engine.num_drafted, engine.num_accepted))
        (ours, *counts), (theirs, *others) = records
        assert counts == others and counts[0] > 0
        for one, other in zip(ours, theirs, strict=True):
            assert one.generated_tokens == other.generated_tokens
            assert one.generated_log_probs == pytest.approx(other.generated_log_probs, abs=1e-9)
        tokens += [record.generated_tokens for record in ours]
    staged = ProcessGroups.build(ParallelPlan(pp=2))
    with pytest.raises(ValueError, match="MtpSpeculation reads states of one stage, found pp=2"):
        build(GPTModel(config, staged, attention_core=PagedAttention(), dtype=torch.float64).eval(), MtpSpeculation())
    whole = GPTModel(config, ONE, attention_core=PagedAttention(), dtype=torch.float64)
    with pytest.raises(ValueError, match="tp=1 and the model 2"):
        split = GPTModel(config, groups, attention_core=PagedAttention(), dtype=torch.float64)
        build(split.eval(), EagleSpeculation(head=head_of(whole)))
    return tokens


def few_tokens(model: GPTModel) -> EagleHead:
    """A head of half of the tokens, in the model's layout."""
    vocabulary = DraftVocabulary(torch.arange(0, V, 2), V)
    config = EagleConfig.of_target(model.config, draft_vocab_size=len(vocabulary))
    return EagleHead(config, model.groups, vocabulary=vocabulary, attention_core=PagedAttention(), dtype=model.dtype, seed=5)


@pytest.mark.journey
@pytest.mark.world(2)
def test_heads_that_are_split_propose_what_whole_ones_do(world: Callable[..., list[Any]]) -> None:
    one, two = world(check_split_heads)
    assert one == two
