# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a run says of memory, of fp8, of data parallelism and of its corpora is what its training does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.data import preprocess
from mcore_parallel.data_parallel import DistributedDataParallel
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import OffloadConfig, RecomputeConfig
from mcore_tools.assembly import assemble, datasets, open_tokenizer, step_batches
from mcore_tools.recipes import DataConfig, FIMConfig, RecipeError, RunConfig, override, recipe
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus

TEXT = "a run says what it is made of and every word of it counts. "
OTHER = "numbers in columns: 1 2 3 5 8 13 21 34 55 89. "


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpora ``a`` and ``b``, which share the tokenizer of ``a``."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "a").mkdir()
    tokenizer = write_corpus(folder / "a", TEXT, num_documents=20)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": OTHER * 20}) + "\n" for _ in range(20)), encoding="ascii")
    preprocess([folder / "b.jsonl"], str(folder / "b"), tokenizer, append_eod=True)
    return folder


def small(corpora: Path, output: Path, *changes: str) -> RunConfig:
    sizes = ("model.num_layers=3", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.dtype=float64")
    rhythm = ("train.steps=6", "train.seq_len=32", "train.micro_batch_size=4", "train.warmup_steps=1", "train.eval_interval=0")
    sinks = ("log.tensorboard=false", "log.html=false", "train.eval_batches=1", "data.split=80,20,0", f"output={output}")
    places = () if any("data.blend=" in change for change in changes) else (f"data.prefix={corpora}/a/corpus",)
    return override(recipe("gpt_tiny"), [*sizes, *rhythm, *sinks, *places, f"data.tokenizer={corpora}/a/tokenizer", *changes])


def curve(config: RunConfig) -> list[float]:
    lines = (Path(config.output) / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def train(corpora: Path, output: Path, *changes: str) -> list[float]:
    config = small(corpora, output, *changes)
    train_rank(config, "cpu")
    return curve(config)


@pytest.fixture(scope="module")
def plain(corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(corpora, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("recompute.granularity=full", "recompute.num_layers=2"), marks=pytest.mark.journey),
        ("recompute.modules=[norm,core_attention]",),
        pytest.param(("offload.on_cpu=true", "offload.min_offloaded_tensor_size=1"), marks=pytest.mark.journey),
        ("ddp.bucket_size=100", "ddp.gradient_accumulation_fusion=false"),
    ],
    ids=["full", "selective", "offload", "ddp"],
)
def test_choices_of_memory_leave_every_bit(changes: tuple[str, ...], corpora: Path, plain: list[float], tmp_path: Path) -> None:
    config = small(corpora, tmp_path, *changes)
    parts = assemble(config, "cpu")
    assert isinstance(parts.model, GPTModel) and isinstance(parts.sync, DistributedDataParallel)
    assert (parts.model.memory.recompute, parts.model.memory.offload) == (config.recompute, config.offload)
    assert config.ddp in (None, parts.sync.config)
    parts.close()
    assert train(corpora, tmp_path, *changes) == plain


@pytest.mark.journey
def test_attention_logits_of_a_run_are_bounded(corpora: Path, plain: list[float], tmp_path: Path) -> None:
    high = train(corpora, tmp_path / "high", "qk_clip.threshold=1e6")
    assert high == plain
    rows = [json.loads(line) for line in (tmp_path / "high" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    logits = [row["qk_clip/max_logit"] for row in rows if "qk_clip/max_logit" in row]
    assert len(logits) == 6 and all(row["qk_clip/heads"] == 0 for row in rows if "qk_clip/heads" in row)
    bound = max(logits) / 4
    changes = ("optimizer.use_distributed_optimizer=true", f"qk_clip.threshold={bound}")
    assert train(corpora, tmp_path / "low", *changes) != plain
    rows = [json.loads(line) for line in (tmp_path / "low" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    clipped = [row for row in rows if row.get("qk_clip/heads")]
    assert clipped and rows[-1]["qk_clip/max_logit"] < 2 * bound


@pytest.mark.journey
def test_fp8_trains_near_the_model_in_its_own_dtype(corpora: Path, tmp_path: Path) -> None:
    wide = train(corpora, tmp_path / "wide", "train.dtype=float32")
    narrow = train(corpora, tmp_path / "narrow", "train.dtype=float32", "fp8.recipe=rowwise", "fp8.num_layers_at_end_in_bf16=1")
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=2e-2)


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", ["optim", pytest.param("optim_grads_params", marks=pytest.mark.journey)])
def test_sharded_runs_take_the_same_choices(world: Any, strategy: str, corpora: Path, plain: list[float], tmp_path: Path) -> None:
    changes = (
        "plan.dp=2",
        "data_parallel=fsdp",
        f"fsdp.zero_dp_strategy={strategy}",
        "fsdp.num_prefetch_units=2",
        "train.micro_batch_size=4",
    )
    config = small(corpora, tmp_path, *changes, "recompute.granularity=full")
    world(_train, config=config)
    assert curve(config) == pytest.approx(plain, rel=1e-9)


def _train(config: RunConfig) -> float:
    return train_rank(config, "cpu").validation_loss


def test_a_blend_gives_its_shares(corpora: Path, tmp_path: Path) -> None:
    blend = (f"data.blend=[{corpora}/a/corpus,{corpora}/b]", "data.blend_weights=[3,1]", "train.steps=40")
    config = small(corpora, tmp_path, *blend)
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
    samples, _ = datasets(config, tokenizer)
    texts = [tokenizer.detokenize(samples[number]["tokens"].tolist()) for number in range(400)]
    of_b = sum(any(map(str.isdigit, text)) for text in texts) / len(texts)
    assert of_b == pytest.approx(0.25, abs=0.03)


def test_documents_are_rearranged_for_filling_in(corpora: Path, tmp_path: Path) -> None:
    tokens = ("data.fim.prefix_token=#", "data.fim.middle_token=$", "data.fim.suffix_token=%", "data.fim.pad_token=&")
    config = small(corpora, tmp_path, "data.fim.rate=1.0", *tokens)
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
    samples, _ = datasets(config, tokenizer)
    text = tokenizer.detokenize(samples[0]["tokens"].tolist())
    assert all(mark in text for mark in "#$%")
    assert train(corpora, tmp_path, "data.fim.rate=1.0", *tokens)[-1] < 6.0


def test_fragments_are_rearranged_each_by_itself(corpora: Path, tmp_path: Path) -> None:
    tokens = ("data.fim.prefix_token=#", "data.fim.middle_token=$", "data.fim.suffix_token=%", "data.fim.pad_token=&", "data.fim.rate=1.0")

    def text(*changes: str) -> str:
        config = small(corpora, tmp_path, *changes)
        tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
        samples, _ = datasets(config, tokenizer)
        return "".join(tokenizer.detokenize(samples[number]["tokens"].tolist()) for number in range(20))

    plain = text()
    # Pieces of a sample that begin with a document stay as they are; those within one do not begin so.
    assert (
        text(*tokens).count("a run says") < text(*tokens, "data.fim.no_prefix=a run says").count("a run says") < plain.count("a run says")
    )
    assert text(*tokens, "data.fim.split_sample=.", "data.fim.fragment_rate=0.0") == plain
    whole, cut = text(*tokens), text(*tokens, "data.fim.split_sample=.", "data.fim.fragment_rate=1.0")
    assert cut.count("#") > 2 * whole.count("#") > 0


@pytest.mark.journey
def test_documents_of_one_sequence_do_not_meet(corpora: Path, plain: list[float], tmp_path: Path) -> None:
    config = small(
        corpora, tmp_path, "data.inter_document_masking=true", "train.seq_len=64", "train.global_batch_size=4", "train.steps=100"
    )
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
    samples, _ = datasets(config, tokenizer)
    (batch,) = next(step_batches(config, samples, ProcessGroups.single(), "cpu"))
    assert batch.cu_seqlens is not None and batch.positions is not None
    starts = 1 + (batch.tokens.flatten()[:-1] == tokenizer.eod).nonzero().flatten()
    assert len(starts) and sorted({*starts.tolist(), *range(0, 257, 64)}) == batch.cu_seqlens.tolist()
    assert (batch.positions.flatten()[starts] == 0).all()
    changes = ("data.inter_document_masking=true", "data.eod_mask_loss=true")
    masked = train(corpora, tmp_path / "masked", *changes)
    assert masked != plain and masked == pytest.approx(plain, rel=0.05)


@pytest.mark.journey
@pytest.mark.world(2)
@pytest.mark.parametrize("plan", ["plan.tp=2", "plan.pp=2", "plan.dp=2"])
def test_documents_are_kept_apart_in_every_layout(world: Any, plan: str, corpora: Path, tmp_path: Path) -> None:
    changes = ("data.inter_document_masking=true", "data.eod_mask_loss=true", "model.num_layers=2", "train.steps=3")
    config = small(corpora, tmp_path / "split", *changes, plan)
    world(_train, config=config)
    assert curve(config) == pytest.approx(train(corpora, tmp_path / "whole", *changes), rel=1e-9)


def test_ends_of_documents_have_no_loss(corpora: Path, tmp_path: Path) -> None:
    config = small(corpora, tmp_path, "data.eod_mask_loss=true")
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
    samples, _ = datasets(config, tokenizer)
    found = [samples[number] for number in range(100)]
    assert any((sample["tokens"] == tokenizer.eod).any() for sample in found)
    assert all(torch.equal(sample["loss_mask"] == 0, sample["tokens"] == tokenizer.eod) for sample in found)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_further_tokens_are_weighed(factor: float, corpora: Path, tmp_path: Path) -> None:
    train(corpora, tmp_path, "model.mtp_num_layers=1", f"train.mtp_loss_scaling_factor={factor}", "train.steps=2")
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        # The means are over nearly as many tokens: the last one of a sequence has no label ahead.
        assert row["loss"] == pytest.approx(row["lm_loss"] + factor * row["mtp_1_loss"], rel=0.05 if factor else 1e-12)


@pytest.mark.journey
def test_numbers_of_each_layer_may_be_left_out(corpora: Path, tmp_path: Path) -> None:
    experts = ("moe.num_moe_experts=2", "moe.moe_router_load_balancing_type=aux_loss", "moe.moe_aux_loss_coeff=0.1", "train.steps=2")
    names = []
    for number, choice in enumerate(("true", "false")):
        train(corpora, tmp_path / choice, *experts, f"log.per_layer_values={choice}")
        lines = (tmp_path / choice / "train.jsonl").read_text(encoding="utf-8").splitlines()
        names.append({name for row in map(json.loads, lines) for name in row})
        assert bool([name for name in names[number] if "layer" in name]) is (choice == "true")
    assert names[1] < names[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["ddp.bucket_size=10", "data_parallel=fsdp", "plan.dp=2"], "set ddp=none, or data_parallel=ddp"),
        (["ddp.use_distributed_optimizer=true"], "must be equal; set both"),
        (["fsdp.zero_dp_strategy=optim"], "fsdp is set, but data_parallel='ddp'"),
        (["fsdp.num_prefetch_units=-1"], "num_prefetch_units=-1 must not be negative"),
        (["offload.modules=[expert_fc1]"], "this model has none, name mlp"),
        (["recompute.modules=[moe_act]"], r"recompute.modules holds \['moe_act'\], .* this model has none, name mlp"),
        (["offload.modules=[layer]", "cuda_graphs=['layers.*']"], "exclude one another"),
        (["backend=cudnn"], "backend='cudnn' is not of type"),
        (["recompute.granularity=all"], "recompute.granularity='all' is not of type"),
        (["data.blend=[x,y]"], "both name the corpus"),
        (["data.prefix=", "data.blend=[x,y]", "data.blend_weights=[1]"], "has 1 entries for 2 corpora"),
        (["data.prefix=", "data.blend=[x,y]", "data.blend_weights=[1,0]"], "holds 0.0, which must be above 0"),
        (["batch_invariant=true", "fp8.recipe=rowwise"], "batch_invariant=true does not go with fp8, whose scales .* set fp8=none"),
        (["qk_clip.threshold=0"], r"qk_clip\.threshold=0.0 must be above 0"),
        (["qk_clip.alpha=0.5", "plan.pp=2"], r"qk_clip does not go with plan\.pp=2; set plan\.pp=1, or qk_clip=none"),
        (["qk_clip.alpha=0.5", "model.qk_layernorm=true"], "which bounds logits already"),
        (["data.fim.split_sample=x"], r"data\.fim\.split_sample='x' and data\.fim\.fragment_rate=None go together; set both or none"),
        (["data.fim.fragment_rate=2"], r"fragment_rate=2.0 must lie in \[0, 1\]"),
        (["data.inter_document_masking=true", "plan.cp=2"], r"plan\.cp=2, which cuts each document evenly; set plan\.cp=1"),
        (["data.fim.rate=0.5", "sft.data=[chat.jsonl]"], "data.fim rearranges documents of text, of which sft has none; set data.fim=none"),
        (["data.eod_mask_loss=true", "masked.mask_token=7"], r"texts whose next tokens are predicted, and masked is set; set data\.eod"),
        (["train.mtp_loss_scaling_factor=1"], r"model\.mtp_num_layers=0; set model\.mtp_num_layers=1, or leave the factor"),
        (["train.mtp_loss_scaling_factor=-1"], "mtp_loss_scaling_factor=-1.0 must not be negative"),
        (["data.fim.rate=2"], r"rate=2.0 must lie in \[0, 1\]"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changes: list[str], message: str) -> None:
    config = override(recipe("gpt_tiny"), ["data.prefix=corpus"])
    with pytest.raises(RecipeError, match=message):
        override(config, changes)


def test_defaults_are_off() -> None:
    config = recipe("gpt_tiny")
    assert (config.recompute, config.offload, config.fp8, config.ddp, config.backend) == (None, None, None, None, "torch")
    assert config.data == DataConfig() and FIMConfig().rate == 0.5
    # As it is spelled where nothing is gathered in 8 bits.
    assert override(config, ["fsdp.eight_bit_parameters=[]"]) == config
    assert RecomputeConfig().granularity == "selective" and OffloadConfig().modules == ("layer",)
