# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run takes weights of its own model only: what the checkpoint says of it is compared before anything is written."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from mcore_ckpt import CheckpointManager, save
from mcore_ckpt.hf import export_hf, import_checkpoint_hf
from mcore_ckpt.storage import open_folder
from mcore_moe import MoEConfig
from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import LatentAttentionConfig
from mcore_tools.cli import main
from mcore_tools.recipes import RecipeError, RunConfig, config_text, override, read_config, recipe
from mcore_tools.training import check_stored, train_rank
from tests.support.corpora import write_corpus

SMALL = ("model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=2", "model.ffn_hidden_size=24", "model.vocab_size=320")
OTHER = ("model.rotary_base=77", "model.norm_epsilon=0.1", "model.activation=geglu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, "to be or not to be, that is the question. ")
    return [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", "train.seq_len=16"),
        *("train.micro_batch_size=1", "train.global_batch_size=2", "train.steps=1", "train.eval_batches=1", "train.eval_interval=0"),
        *("train.warmup_steps=0", "log.tensorboard=false", "log.html=false", *SMALL),
    ]


def small(*changes: str) -> RunConfig:
    return override(recipe("gpt_tiny"), [*SMALL, *changes])


def stored(folder: Path, *, run: str | None = None, **extra: object):
    """A checkpoint with nothing but what it says of itself."""
    save({"x": torch.zeros(1)}, folder, extra=extra, assets={} if run is None else {"run.yaml": run.encode()})
    return open_folder(folder)


def test_imported_weights_are_of_the_imported_model(corpus: list[str], tmp_path: Path) -> None:
    config = small().model
    model = GPTModel(config, ProcessGroups.single())
    weights = {shard.name: shard.parameter.detach() for shard in named_shards(model)}
    export_hf(weights, tmp_path / "hf", family="llama", config=dataclasses.asdict(config))
    import_checkpoint_hf(tmp_path / "hf", tmp_path / "imported")
    run = override(recipe("gpt_tiny"), [*corpus, f"output={tmp_path}/run", f"load.path={tmp_path}/imported"])
    with pytest.raises(ValueError) as caught:
        train_rank(override(run, OTHER), "cpu")
    for words in ("model.rotary_base=10000.0 there, 77.0 here", "norm_epsilon=1e-05 there, 0.1 here", "'swiglu' there, 'geglu' here"):
        assert words in str(caught.value)
    assert "load.override=[model.norm_epsilon,model.activation,model.rotary_base]" in str(caught.value)
    assert not (tmp_path / "run").exists()
    train_rank(run, "cpu")


def test_a_run_that_goes_on_is_the_run_that_stopped(corpus: list[str], tmp_path: Path) -> None:
    run = override(recipe("gpt_tiny"), [*corpus, f"output={tmp_path}/run"])
    train_rank(run, "cpu")
    log = (tmp_path / "run" / "config.yaml").read_text()
    longer = override(run, ["train.steps=2", "model.rotary_base=77"])
    with pytest.raises(
        ValueError, match=r"step_00000001 holds the weights of another model: model\.rotary_base=10000\.0 there, 77\.0 here"
    ):
        train_rank(longer, "cpu")
    assert (tmp_path / "run" / "config.yaml").read_text() == log
    # On purpose, and from then on without a word.
    train_rank(override(longer, ["load.override=[model.rotary_base]"]), "cpu")
    train_rank(override(longer, ["train.steps=3"]), "cpu")
    assert CheckpointManager(tmp_path / "run" / "checkpoints").latest() == 3
    begun = override(run, [f"output={tmp_path}/other", f"load.path={tmp_path}/run/checkpoints", "load.step=1", "train.steps=1"])
    train_rank(begun, "cpu")
    with pytest.raises(ValueError, match=r"rotary_base=77\.0 there, 10000\.0 here"):
        train_rank(override(begun, [f"output={tmp_path}/third", "load.step=2"]), "cpu")


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("model.num_query_groups=2", "model.kv_channels=8"),
        ("model.attention_backend=torch", "model.init_method_std=0.5"),
        ("model.softmax_scale=0.35355339059327373",),
        ("model.rotary_base_window=10000", "model.window_attn_skip_freq=[1,1]"),
        ("model.window_attn_skip_freq=([1]*2)",),
        ("train.seed=9", "optimizer.lr=1", "plan.dp=2"),
    ],
    ids=str,
)
def test_another_spelling_of_the_same_model_is_the_same_model(changes: tuple[str, ...], tmp_path: Path) -> None:
    window = "model.window_size=[3,0]"
    check_stored(small(window, *changes), stored(tmp_path / "c", run=config_text(small(window))))


def test_every_field_is_compared_but_those_that_change_no_numbers(tmp_path: Path) -> None:
    folder = stored(tmp_path / "c", run=config_text(small()))
    for change in (
        *("model.layernorm_zero_centered_gamma=true", "model.softmax_scale=2", "model.embedding_multiplier=3", "model.rotary_percent=0.5"),
        *("model.no_rope_freq=2", "model.rotary_interleaved=true", "model.seq_len_interpolation_factor=2", "model.output_multiplier=0.5"),
        *("model.softmax_type=off-by-one", "model.qk_layernorm=true", "model.window_size=[3,0]", "model.position_embedding_type=none"),
    ):
        name = change.partition("=")[0]
        with pytest.raises(ValueError, match=rf"{name}=.* there, .* here"):
            check_stored(small(change), folder)
        check_stored(small(change, f"load.override=[{name}]"), folder)


def test_experts_are_compared_too(tmp_path: Path) -> None:
    tiny = recipe("moe_tiny")
    folder = stored(tmp_path / "run", run=config_text(tiny))
    check_stored(override(tiny, ["moe.moe_aux_loss_coeff=0.5"]), folder)
    with pytest.raises(ValueError, match=r"moe\.moe_router_topk=2 there, 1 here; moe\.moe_router_score_function='softmax' there"):
        check_stored(override(tiny, ["moe.moe_router_topk=1", "moe.moe_router_score_function=sigmoid"]), folder)
    with pytest.raises(ValueError, match=r"moe\.num_moe_experts=4 there, None here"):
        check_stored(dataclasses.replace(tiny, moe=None), folder)
    # That of a dense layer counts where there is one.
    mixed = override(tiny, [f"moe.moe_layer_freq=[0{',1' * (tiny.model.num_layers - 1)}]", "moe.moe_ffn_hidden_size=16"])
    beside = stored(tmp_path / "mixed", run=config_text(mixed))
    check_stored(override(mixed, [f"model.ffn_hidden_size={mixed.model.ffn_size}"]), beside)
    with pytest.raises(ValueError, match=rf"model\.ffn_hidden_size={mixed.model.ffn_size} there, 40 here\. Set"):
        check_stored(override(mixed, ["model.ffn_hidden_size=40"]), beside)
    # The width of an expert stands for that of the feed-forward in an import.
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 320, "ffn_hidden_size": 24, "num_moe_experts": 4}
    imported = stored(tmp_path / "import", config={**sizes, "moe_router_topk": 2}, hf_config={})
    run = dataclasses.replace(small(), moe=MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=24))
    check_stored(run, imported)
    with pytest.raises(ValueError, match=r"moe\.moe_ffn_hidden_size=24 there, 32 here"):
        check_stored(dataclasses.replace(run, moe=MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=32)), imported)


def test_what_an_import_does_not_say_is_not_compared(tmp_path: Path) -> None:
    folder = stored(tmp_path / "c", config={"num_layers": 2, "hidden_size": 16, "norm_epsilon": 1e-6})
    with pytest.raises(ValueError, match=r"another model: model\.norm_epsilon=1e-06 there, 1e-05 here\. "):
        check_stored(small(), folder)
    check_stored(small("model.norm_epsilon=1e-6", "model.rotary_base=77"), folder)
    check_stored(small(), stored(tmp_path / "plain"))
    check_stored(small(), None)


def test_groups_of_fields_are_compared_with_what_is_left_out(tmp_path: Path) -> None:
    sizes = LatentAttentionConfig(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
    model = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=320, latent_attention=sizes)
    run = dataclasses.replace(small(), model=model)
    text = yaml.safe_load(config_text(run))
    # A run of before the field.
    del text["model"]["latent_attention"]["norm_epsilon"]
    folder = stored(tmp_path / "c", run=yaml.safe_dump(text))
    check_stored(run, folder)
    same = dataclasses.replace(model, latent_attention=dataclasses.replace(sizes, norm_epsilon=model.norm_epsilon))
    check_stored(dataclasses.replace(run, model=same), folder)
    other = dataclasses.replace(model, latent_attention=dataclasses.replace(sizes, norm_epsilon=1e-6))
    with pytest.raises(ValueError, match=r"model\.latent_attention=.*'norm_epsilon': None.* there, .* here"):
        check_stored(dataclasses.replace(run, model=other), folder)


def test_a_configuration_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, parse = small("train.seed=7123"), yaml.safe_load
    folder, parsed = stored(tmp_path / "c", run=config_text(run)), []

    def noted(text: str) -> object:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(yaml, "safe_load", noted)
    for _ in range(3):
        check_stored(run, folder)
    assert parsed == [config_text(run)]


def test_what_an_earlier_release_trained_is_used_and_gone_on_with(
    corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = override(recipe("gpt_tiny"), [*corpus, f"output={tmp_path}/run"])
    earlier = yaml.safe_load(config_text(run))
    earlier["optimizer"] |= {"optimizer": "lion", "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    earlier["recompute"] = {"granularity": "selective", "num_layers": 2}
    earlier["log"]["gone"] = True
    with monkeypatch.context() as patched:
        patched.setattr("mcore_tools.training._folder.config_text", lambda _: yaml.safe_dump(earlier))
        train_rank(run, "cpu")
    with pytest.raises(RecipeError):
        read_config(tmp_path / "run" / "config.yaml")
    assert main(["convert", "export-hf", f"{run.output}/checkpoints", f"{tmp_path}/hf"]) == 0
    (tmp_path / "text.txt").write_text("to be or not")
    answers = []
    for model in (run.output, f"{tmp_path}/hf"):
        assert main(["eval", model, "--max-length", "16", "--text", f"{tmp_path}/text.txt"]) == 0
        capsys.readouterr()
        assert main(["generate", model, "--prompt", "to be", "--max-tokens", "4", "--temperature", "0", "--ignore-eos"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    train_rank(override(run, ["train.steps=2"]), "cpu")
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("model: [", r"run\.yaml is no YAML"),
        ("model: {num_layer: 2}", "'num_layer' is no field"),
        pytest.param("[" * 5000, r"run\.yaml is no YAML", marks=pytest.mark.journey),
    ],
    ids=["yaml", "field", "deep"],
)
def test_a_configuration_that_cannot_be_read_is_named(run: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"keeps a configuration that cannot be compared with this run: .*{words}"):
        check_stored(small(), stored(tmp_path / "c", run=run))


def test_an_override_of_no_field_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"load\.override='model\.rotary_bas' is no field of a model; write 'model\.rotary_base'"):
        small("load.override=[model.rotary_bas]")
