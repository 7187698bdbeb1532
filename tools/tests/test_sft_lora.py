# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A published model is tuned by adapters alone, which are saved, go on, and are exported merged or by themselves."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from mcore_ckpt import CheckpointManager
from mcore_ckpt.hf import import_adapter_hf, import_hf, merge_adapter, merge_adapter_hf
from mcore_ckpt.manifest import read_manifest
from mcore_inference import SamplingParams
from mcore_tools import sft, train
from mcore_tools.assembly import throughput
from mcore_tools.launch import launch
from mcore_tools.recipes import override, recipe
from mcore_tools.serving import open_engine
from mcore_tools.training import export_adapter, train_rank, with_adapter
from tests.support.published import ANSWERS, write_chat, write_published

LORA = ("lora.rank=8", "lora.alpha=32")
FAST = (*LORA, "train.seq_len=128", "train.global_batch_size=4", "log.tensorboard=false", "log.html=false")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Logits of a frozen output layer are bounded by its weights.
    return write_published(tmp_path_factory.mktemp("published") / "llama", initializer_range=0.2)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("chat") / "chat.jsonl")


def tune(model: Path, chat: Path, output: Path, *changes: str) -> int:
    sets = [word for change in (*FAST, *changes) for word in ("--set", change)]
    return sft.main([str(model), "--data", str(chat), "--output", str(output), *sets])


@pytest.fixture(scope="module")
def tuned(published: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "tuned"
    assert tune(published, chat, output, "sft.epochs=10", "optimizer.lr=2e-2") == 0
    return output


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in map(json.loads, (run / "train.jsonl").read_text().splitlines()) if "loss" in entry]


def answers(folder: Path) -> dict[str, str]:
    engine = open_engine(folder, "cpu", cache_gb=0.01)
    asked = [[{"role": "user", "content": f"which fruit is {colour}?"}] for colour in ANSWERS]
    prompts = [engine.tokenizer.apply_chat_template(turns, add_generation_prompt=True) for turns in asked]
    records = engine.generate(prompts, SamplingParams(temperature=0.0, num_tokens_to_generate=8))
    return dict(zip(ANSWERS, (record.generated_text for record in records), strict=True))


def test_the_loss_falls_and_the_run_and_its_export_answer_as_taught(tuned: Path) -> None:
    found = losses(tuned)
    assert found[-1] < 0.1 * found[0]
    assert answers(tuned / "hf") == ANSWERS
    assert answers(tuned) == ANSWERS


def test_a_step_holds_adapters_and_their_optimizer_state_alone(tuned: Path) -> None:
    manager = CheckpointManager(tuned / "checkpoints")
    step = manager.latest()
    assert step is not None
    names = set(read_manifest(manager.folder(step)).tensors)
    parts = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    adapters = {f"layers.{layer}.{part}.lora.{half}" for layer in range(2) for part in parts for half in "AB"}
    assert {name for name in names if not name.startswith("optimizer.")} == adapters
    assert {name.split(".", 2)[2] for name in names - adapters} == adapters


def test_the_export_is_the_base_with_the_adapters_added(tuned: Path, published: Path, chat: Path) -> None:
    from transformers import AutoModelForCausalLM

    # The run is at its end: this exports only.
    assert tune(published, chat, tuned, "sft.epochs=10", "optimizer.lr=2e-2", "sft.export=adapter") == 0
    family, config, tensors = import_hf(published)
    base = dict(tensors)
    adapter, ours = import_adapter_hf(tuned / "adapter", family=family, config=config)
    assert (adapter.rank, adapter.alpha, adapter.base_model) == (8, 32.0, str(published))
    merged = dict(import_hf(tuned / "hf").tensors)
    for name, tensor in merge_adapter(base, ours, adapter.scaling):
        assert torch.equal(merged[name], tensor), name
        assert torch.equal(merged[name], base[name]) == (name.replace(".weight", ".lora.B") not in ours), name
    theirs = AutoModelForCausalLM.from_pretrained(tuned / "hf").state_dict()
    assert torch.equal(theirs["model.layers.0.mlp.down_proj.weight"], merged["layers.0.mlp.down.weight"])


def test_a_stopped_run_goes_on_with_its_bits(published: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("train.lr_schedule=constant", "lora.targets=[qkv, down]", "lora.dropout=0.2", "train.eval_interval=0")
    assert tune(published, chat, tmp_path / "whole", *changes, "train.steps=4") == 0
    assert tune(published, chat, tmp_path / "run", *changes, "train.steps=2") == 0
    (tmp_path / "run" / "hf").rename(tmp_path / "first")
    capsys.readouterr()
    assert tune(published, chat, tmp_path / "run", *changes, "train.steps=4") == 0
    assert f"step 2 of {tmp_path / 'run' / 'checkpoints'} on weights of {published}" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    whole, again = (dict(import_hf(tmp_path / name / "hf").tensors) for name in ("whole", "run"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert tune(published, chat, tmp_path / "run", *changes, "train.steps=6", "lora.rank=4", f"output={tmp_path}/run", "lora.alpha=8") == 2
    assert "hf is there" in capsys.readouterr().err
    (tmp_path / "run" / "hf").rename(tmp_path / "second")
    assert tune(published, chat, tmp_path / "run", *changes, "train.steps=6", "lora.rank=4") == 2
    assert "lora.rank=4, and the adapters in" in capsys.readouterr().err
    # Adapters alone are no base, merged they are.
    assert tune(tmp_path / "run", chat, tmp_path / "more", "train.steps=1") == 2
    assert "holds adapters alone; begin with an export" in capsys.readouterr().err
    assert tune(tmp_path / "second", chat, tmp_path / "more", "train.steps=1") == 0


@pytest.mark.journey
def test_adapters_beside_eight_bit_weights_learn_go_on_and_merge_onto_the_original_ones(
    published: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("lora.base_dtype=fp8", "sft.epochs=10", "optimizer.lr=2e-2", "train.eval_interval=0")
    assert tune(published, chat, tmp_path / "whole", *changes) == 0
    found = losses(tmp_path / "whole")
    assert found[-1] < 0.1 * found[0]
    assert answers(tmp_path / "whole" / "hf") == ANSWERS
    base, merged = (dict(import_hf(folder).tensors) for folder in (published, tmp_path / "whole" / "hf"))
    assert tune(published, chat, tmp_path / "whole", *changes, "sft.export=adapter") == 0
    family, config, _ = import_hf(published)
    adapter, parts = import_adapter_hf(tmp_path / "whole" / "adapter", family=family, config=config)
    assert all(torch.equal(merged[name], tensor) for name, tensor in merge_adapter(base, parts, adapter.scaling))
    names = read_manifest(CheckpointManager(tmp_path / "whole" / "checkpoints").folder(len(found))).tensors
    assert all(".lora." in name for name in names)
    steps = ("train.lr_schedule=constant", "lora.base_dtype=fp8_weight_only", "train.eval_interval=0")
    assert tune(published, chat, tmp_path / "once", *steps, "train.steps=4") == 0
    assert tune(published, chat, tmp_path / "twice", *steps, "train.steps=2") == 0
    (tmp_path / "twice" / "hf").rename(tmp_path / "first")
    assert tune(published, chat, tmp_path / "twice", *steps, "train.steps=4") == 0
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    (tmp_path / "twice" / "hf").rename(tmp_path / "second")
    capsys.readouterr()
    assert tune(published, chat, tmp_path / "twice", *steps, "train.steps=6", "lora.base_dtype=fp8") == 2
    assert "lora.base_dtype='fp8', and the adapters in" in capsys.readouterr().err


def test_experts_beside_adapters_are_kept_in_eight_bits(published: Path, chat: Path, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "max_position_embeddings": 256}
    mixture = shutil.copytree(published, tmp_path / "mixture")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, head_dim=16)).save_pretrained(mixture)
    targets = ("lora.targets=[qkv,experts]", "train.steps=2", "train.eval_interval=0")
    for name, more in (("wide", ()), ("narrow", ("lora.base_dtype=fp8_weight_only",))):
        assert tune(mixture, chat, tmp_path / name, *targets, *more) == 0
    assert losses(tmp_path / "wide") == pytest.approx(losses(tmp_path / "narrow"), rel=0.02)
    assert losses(tmp_path / "wide") != losses(tmp_path / "narrow")
    # The export adds adapters to the original weights.
    base, merged = (dict(import_hf(folder).tensors) for folder in (mixture, tmp_path / "narrow" / "hf"))
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])}
    assert changed == {"layers.0.attention.qkv.weight", "layers.0.mlp.experts.up", "layers.0.mlp.experts.down"}


LAYOUTS = {
    "tp": ["plan.tp=2"],
    "sp": ["plan.tp=2", "plan.sequence_parallel=true"],
    "pp": ["plan.pp=2"],
    "fsdp": ["plan.dp=2", "data_parallel=fsdp"],
    "fsdp2": ["plan.dp=2", "data_parallel=fsdp2"],
}


@pytest.fixture(scope="module")
def alone(published: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank."""
    return trained_losses(published, chat, tmp_path_factory.mktemp("alone") / "run", 1, [])


def trained_losses(published: Path, chat: Path, output: Path, ranks: int, layout: list[str]) -> list[float]:
    base = sft.base_config(str(published), [str(chat)], str(output))
    changes = [*FAST, "train.steps=3", "train.dtype=float64", "train.eval_interval=0", "optimizer.weight_decay=0.1", *layout]
    config = sft.prepared(override(base, changes), ["train.steps", "train.eval_batches"], rank=0)
    train_rank(config, "cpu") if ranks == 1 else launch(train_rank, ranks, config=config, kind="cpu")
    return losses(output)


@pytest.mark.journey
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(published: Path, chat: Path, tmp_path: Path, alone: list[float], layout: str) -> None:
    found = trained_losses(published, chat, tmp_path / "run", 2, LAYOUTS[layout])
    assert len(alone) == 3 and found == pytest.approx(alone, rel=1e-9)
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    assert all(".lora." in name for name in read_manifest(manager.folder(3)).tensors)


def test_frozen_weights_count_no_gradient_of_their_own(published: Path, chat: Path, tmp_path: Path) -> None:
    base = sft.base_config(str(published), [str(chat)], str(tmp_path / "run"))
    whole, adapters = (throughput(override(base, changes), "cpu").flops_per_token for changes in ([], LORA))
    assert 0.66 < adapters / whole < 0.8


@pytest.fixture(scope="module")
def of_peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as PEFT writes it: those of q and v of each layer differ in A."""
    folder = tmp_path_factory.mktemp("peft")
    draws = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(2):
        for part, size in (("q_proj", 64), ("v_proj", 32)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{part}.lora"
            tensors[f"{stem}_A.weight"] = torch.randn(4, 64, generator=draws) * 0.1
            tensors[f"{stem}_B.weight"] = torch.randn(size, 4, generator=draws) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def continued(published: Path, chat: Path, output: Path, adapter: Path, ranks: int, *changes: str) -> list[float]:
    sets = [*FAST[2:], f"load.adapter={adapter}", "train.steps=2", "train.dtype=float64", "train.eval_interval=0", *changes]
    base = with_adapter(sft.base_config(str(published), [str(chat)], str(output)), sets)
    config = sft.prepared(override(base, sets), ["train.steps", "train.eval_batches"], rank=0)
    train_rank(config, "cpu") if ranks == 1 else launch(train_rank, ranks, config=config, kind="cpu")
    return losses(output)


@pytest.mark.journey
def test_a_run_begins_with_an_adapter_of_peft_in_every_layout(published: Path, chat: Path, of_peft: Path, tmp_path: Path) -> None:
    one = continued(published, chat, tmp_path / "one", of_peft, 1)
    # The loss of the first step is that of the adapter's model.
    merge_adapter_hf(published, of_peft, tmp_path / "merged", dtype=torch.float64)
    base = sft.base_config(str(tmp_path / "merged"), [str(chat)], str(tmp_path / "whole"))
    changes = [*FAST[2:], "train.steps=1", "train.dtype=float64", "train.eval_interval=0"]
    train_rank(sft.prepared(override(base, changes), ["train.steps", "train.eval_batches"], rank=0), "cpu")
    # The merge is one of float32, in which the weights are stored.
    assert one[0] == pytest.approx(losses(tmp_path / "whole")[0], rel=1e-7)
    assert one[1] != one[0]
    for layout in ("tp", "pp", "fsdp"):
        assert continued(published, chat, tmp_path / layout, of_peft, 2, *LAYOUTS[layout]) == pytest.approx(one, rel=1e-9), layout


@pytest.mark.journey
def test_an_adapter_is_trained_further_saved_and_exported_again(
    published: Path, chat: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_adapter(tuned / "checkpoints", tmp_path / "adapter")
    more = (f"load.adapter={tmp_path / 'adapter'}", "train.eval_interval=0", "train.lr_schedule=constant", "sft.export=adapter")
    begin = [word for change in (*FAST[2:], *more) for word in ("--set", change)]

    def go_on(*changes: str) -> int:
        given = [*begin, *(word for change in changes for word in ("--set", change))]
        return sft.main([str(published), "--data", str(chat), "--output", str(tmp_path / "run"), *given])

    assert go_on("train.steps=1", "optimizer.lr=0", "optimizer.min_lr=0") == 0
    assert f"the adapter in {tmp_path / 'adapter'} on weights of {published}" in capsys.readouterr().out
    family, config, _ = import_hf(published)
    before, after = (
        import_adapter_hf(folder, family=family, config=config) for folder in (tmp_path / "adapter", tmp_path / "run" / "adapter")
    )
    assert before.adapter == after.adapter and (after.adapter.rank, after.adapter.alpha) == (8, 32.0)
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert losses(tmp_path / "run")[0] == pytest.approx(losses(tuned)[-1], abs=0.1)
    # From its own step on the run looks at the adapter no more.
    shutil.rmtree(tmp_path / "run" / "adapter")
    assert go_on("train.steps=2") == 0
    assert f"step 1 of {tmp_path / 'run' / 'checkpoints'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["lora.rank=4"], "holds other adapters: lora.rank: 8 there, 4 here; lora.alpha: 16 there with this rank, 32 here."),
        (
            ["lora.rank=16", "load.override=[lora.rank]"],
            "lora.alpha: 64 there with this rank, 32 here. With lora.rank=16 the adapter keeps its scale by lora.alpha=64. Leave",
        ),
        (
            ["lora.alpha=8"],
            "lora.alpha: 32 there, 8 here. Leave these fields out to have its own, or to change them on purpose set load.ov",
        ),
        (["lora.targets=[qkv]"], "lora.targets: layers.0.attention.out, layers.0.mlp.down"),
        (
            ["lora.rank=4", "lora.alpha=16", "load.override=[lora.rank]"],
            "would be lost in part: lora.rank=4 is below its 8; merge it first",
        ),
        (["lora.targets=[qkv]", "load.override=[lora.targets]"], "lora.targets leaves out layers.0.attention.out"),
        (["lora=none"], "is trained further, and lora=none"),
        (["load.adapter=nowhere"], "there is no folder nowhere"),
        (["load.path=", "lora=none"], "adapter="),
    ],
)
def test_fields_that_an_adapter_has_otherwise_are_refused(
    published: Path, chat: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    export_adapter(tuned / "checkpoints", tmp_path / "adapter")
    given = [word for change in (f"load.adapter={tmp_path / 'adapter'}", *changes) for word in ("--set", change)]
    assert sft.main([str(published), "--data", str(chat), "--output", str(tmp_path / "run"), *given]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message
    assert not (tmp_path / "run").exists()


def test_a_wider_adapter_begins_as_the_stored_one(published: Path, chat: Path, of_peft: Path, tmp_path: Path) -> None:
    one = continued(published, chat, tmp_path / "one", of_peft, 1, "train.steps=1")
    wide = ("lora.rank=12", "lora.alpha=24", "lora.targets=[qkv,up]", "load.override=[lora.rank,lora.targets]", "train.steps=1")
    assert continued(published, chat, tmp_path / "wide", of_peft, 1, *wide) == pytest.approx(one, rel=1e-12)
    manifest = read_manifest(CheckpointManager(tmp_path / "wide" / "checkpoints").folder(1))
    assert manifest.tensors["layers.0.attention.qkv.lora.A"].shape == (12, 64) and "layers.1.mlp.up.lora.B" in manifest.tensors


def test_pre_training_takes_an_adapter_too(published: Path, of_peft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"load.path={published}", f"load.adapter={of_peft}", "lora.dropout=0.1", "--write-config", "-"]
    assert train.main([word for change in given[:3] for word in ("--set", change)] + given[3:]) == 0
    lora = yaml.safe_load(capsys.readouterr().out)["lora"]
    assert lora == {"rank": 8, "alpha": 16.0, "dropout": 0.1, "targets": ["qkv"], "base_dtype": None}
    with pytest.raises(ValueError, match=r"load\.adapter='folder' is for lora, and rl trains whole weights"):
        override(recipe("arithmetic_tiny"), ["load.path=base", "load.adapter=folder"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["lora.targets=[fc1]"], "lora.targets='fc1' names no linear layer; the model has down, out, qkv, up"),
        (["lora.rank=0"], "rank=0 must be at least 1"),
        (["load.take=all"], "lora trains beside the weights of another model"),
        (["backend=te"], "found backend='te'"),
        (["lora.base_dtype=int8"], "int8"),
        (["lora.base_dtype=fp8", "data_parallel=fsdp"], "found data_parallel='fsdp' and fp8=none; set data_parallel=ddp"),
        (["lora.base_dtype=fp8", "fp8.recipe=rowwise"], "found data_parallel='ddp' and fp8=set"),
        (["lora=none", "sft.export=adapter"], "sft.export='adapter' needs adapters"),
    ],
)
def test_what_adapters_cannot_do_is_one_line_before_anything_is_written(
    published: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    given = [word for change in changes for word in ("--set", change)]
    kept = [] if "lora=none" in changes else ["--set", "lora.alpha=8"]
    assert sft.main([str(published), "--data", str(chat), "--output", str(tmp_path / "run"), *kept, *given]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message
    assert not (tmp_path / "run").exists()


def test_training_takes_no_adapters_without_a_base_and_none_of_a_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--recipe", "gpt_tiny", "--set", "lora.rank=8", "--set", f"output={tmp_path}/run"]) == 2
    assert "name a Hugging Face folder or a checkpoint with load.path" in capsys.readouterr().err
    changes = ["lora.targets=[router]", "load.path=base", f"output={tmp_path}/run"]
    with pytest.raises(ValueError, match=r"lora\.targets='router' names layers\.0\.mlp\.router, and \w+ takes no adapter"):
        train_rank(override(recipe("moe_tiny"), changes), "cpu")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"moe\.moe_router_bias_update_rate=0\.001 changes its bias; set it to 0"):
        override(recipe("moe_tiny"), [*changes, "moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true"])
