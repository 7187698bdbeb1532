# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Three mistakes of each verb and more: one line with a remedy, exit code 2, nothing written."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mcore_ckpt import save
from mcore_tools.cli import VERBS, main
from mcore_tools.recipes import config_text, override, recipe
from mcore_tools.training import check_run
from tests.support.corpora import write_corpus
from tests.support.published import write_chat, write_published

CORPUS = "--set data.prefix=corpus --set data.tokenizer=tokenizer --set output=out"
STUDENT = "--set student.data.prefix=corpus --set student.data.tokenizer=tokenizer --set student.output=out"
HEAD = "--set run.data.prefix=corpus --set run.data.tokenizer=tokenizer --set run.output=out"
UPCYCLED = "--set load.path=published --set data.prefix=corpus --set output=out --set load.upcycle=true --set moe.num_moe_experts=4"
SPLIT = "--set data.split=80,20,0"
EIGHT_BIT = "--set data_parallel=fsdp --set fsdp.eight_bit_parameters"
LAYOUT = "--gpus 8 --sequence 4096 --global-batch 64"
OF_HTTP = ("--host 127.0.0.1", "--port 0", "--drain-seconds 30", "--tool-call-parser hermes", "--token-file text.txt")

MISTAKES = [
    ("quickstart --text nothing", "cannot read nothing: no such file or folder; check the path"),
    ("quickstart --text chat.jsonl --output text.txt", "--output='text.txt' can be no folder: "),
    ("quickstart --text text.txt --output published", "which no quickstart wrote; name an empty or a new folder"),
    ("quickstart --text text.txt --output out --set model.vocab_size=10", "model.vocab_size=10 must be at least 261"),
    ("quickstart --text text.txt --output out --set log.wandb_project=p", 'pip install "mcore-parallel[wandb]"'),
    ("preprocess --input nothing --output-prefix out --tokenizer byte", "cannot read nothing: no such file or folder; check the path"),
    ("preprocess --input text.txt --output-prefix out --tokenizer nothing", "nothing"),
    ("preprocess --input text.txt --output-prefix out --tokenizer byte --partition 3", "partition=3 needs partitions; say how many"),
    ("preprocess --input text.txt --output-prefix out --tokenizer byte --append-eodd", "unrecognized arguments: --append-eodd; "),
    ("train", "there is neither --recipe nor --config; recipes: "),
    ("train --set load.path=nothing", "nothing is not a checkpoint: there is no such folder"),
    ("train --set load.path=published --set data.prefix=corpus --set model.num_layers=3", "model.num_layers=2 there, 3 here. Set what"),
    (f"train --recipe gpt_tiny {CORPUS} --set train.steps=10", "train.steps=10 must exceed train.warmup_steps=20; set "),
    (f"train --recipe gpt_tiny {CORPUS} --set train.lr_decay_steps=9", "train.lr_decay_steps=9 must exceed train.warmup_steps=20; set "),
    (f"train --recipe gpt_tiny {CORPUS} --set train.warmup_init_lr=9", "must be at most optimizer.lr=0.003, to which it rises"),
    (f"train --recipe gpt_tiny {CORPUS} --set communicators=nccl.yaml", "cannot be read: nccl.yaml must end in .json or .toml"),
    (f"train --recipe gpt_tiny {CORPUS} --set plan.tp=2", "= 2 ranks, but the world has 1; lower a degree, or start 2 with torchrun"),
    (f"train --recipe gpt_tiny {CORPUS} --set output=text.txt/run", "output='text.txt/run' can be no folder: "),
    (f"train --recipe gpt_tiny {CORPUS} --set backend=te", 'pip install "mcore-parallel[te]", or use "torch"'),
    (f"train --recipe gpt_tiny {CORPUS} --set load.path=tokenizer", "name a checkpoint or a folder of steps"),
    (f"train --recipe moe_tiny {CORPUS} --set load.upcycle=true", "found path='' and take='weights'; name that model with load.path"),
    ("train --set load.path=published --set data.prefix=corpus --set load.upcycle=true", "moe=none; set moe.num_moe_experts=8, or"),
    (f"train {UPCYCLED} --set moe.moe_ffn_hidden_size=100", "layers.0.mlp.experts.down must divide the dense width 128"),
    (f"train {UPCYCLED} --set load.step=1", "is a Hugging Face folder, which has weights only; set load.take=weights load.step=none"),
    (f"train --recipe gpt_tiny {CORPUS} --set train.dtype=half", "dtype='half' must be one of float32, bfloat16, float16, float64"),
    (f"train --recipe gpt_tiny {CORPUS} --set train.dtype=float16 --set fp8.recipe=rowwise", "set train.dtype=bfloat16, or fp8=none"),
    (f"train --recipe gpt_tiny {CORPUS} --set optimizer.loss_scale=8", "and train.dtype='float32'; set train.dtype=float16, or leave op"),
    (f"train --recipe gpt_tiny {CORPUS} --set optimizer.fp16=true", "optimizer.fp16=True scales the loss of float16, and train.dtype="),
    (f"train --recipe gpt_tiny {CORPUS} {EIGHT_BIT}=[x] --set data_parallel=ddp", "fsdp is set, but data_parallel"),
    (f"train --recipe gpt_tiny {CORPUS} {EIGHT_BIT}=[layers.*.up.*]", "one replica: it is not gathered; raise plan.dp"),
    (f"train --recipe gpt_tiny {CORPUS} {EIGHT_BIT}=[layers.*.upweight]", "'layers.*.upweight' matches no parameter; name some of"),
    (f"train --recipe gpt_tiny {CORPUS} --set spans.sentinels=[9]", "set spans.bos_token, spans.eos_token, spans.decoder_length too"),
    (f"train --recipe t5_tiny {CORPUS} --set plan.pp=2", "whose layers stay together, found plan.pp=2; set plan.pp=1"),
    (f"train --recipe t5_tiny {CORPUS} --set data_parallel=fsdp", "not go with data_parallel; set data_parallel=ddp, or spans=none"),
    (f"train --recipe t5_tiny {CORPUS} --set model.vocab_size=2050", "token 2081, which must lie below model.vocab_size=2050; raise"),
    (f"train --recipe t5_tiny {CORPUS} {SPLIT} --set spans.bos_token=7", "of text among the 284 of tokenizer; set spans.sent"),
    (f"train --recipe bert_tiny {CORPUS} {SPLIT} --set masked.mask_token=7", "masked.mask_token=7 is a token of text among the 284"),
    (f"train {UPCYCLED} --set load.upcycle=false", "published holds a dense model, and moe is set here; set load.upcycle=true to make"),
    (f"train --recipe gpt_tiny {CORPUS} --set data.prefix=nothing", "data.prefix='nothing': there is no nothing.idx; give the --output"),
    (f"train --recipe gpt_tiny {CORPUS} --set data.eval_prefix=none", "data.eval_prefix='none': there is no none.idx; give the --outpu"),
    (f"train --recipe gpt_tiny {CORPUS} --set data.tokenizer=nothing", "data.tokenizer='nothing' is neither a file nor a folder; give "),
    ("train --config list.yaml", "list.yaml must map fields to values, found list; --write-config writes such a file"),
    ("train --config torn.yaml", "torn.yaml is no YAML: while parsing a flow node"),
    ("sft nothing --data chat.jsonl --output out", "nothing is not a checkpoint: there is no such folder"),
    ("sft published --data text.jsonl --output a/out", "text.jsonl:1 has no list of messages in the field 'messages'"),
    ("sft published --data half.jsonl --output a/out", "half.jsonl:1: messages[0] must have \"role\" and \"content\" as text, found"),
    ("sft published --data alien.jsonl --output a/out", "alien.jsonl: no conversation with a turn of assistant (1 without); check "),
    ("sft broken --data chat.jsonl --output out", "broken/config.json is no JSON object: Expecting property name"),
    ("sft published --data chat.jsonl --output out --set sft=none", "or start the run with `mcore train`"),
    ("sft published --data chat.jsonl --output out --layout qwen3_0_6@2", "no layout of sft for 'qwen3_0_6'; did you mean 'qwen3_0_6b'"),
    ("sft published --data chat.jsonl --output out --layout qwen3_0_6b@3", "GPUs, found @3; the leanest takes"),
    ("sft published --data chat.jsonl --output out --layout qwen3_0_6b@2", "plan.dp=2 * plan.pp=1 = 2 ranks, but the world has 1"),
    ("sft published --data chat.jsonl --output out --set plan.dp=2", "plan.dp=2 * plan.pp=1 = 2 ranks, but the world has 1"),
    ("sft published --data chat.jsonl --output out --set train.warmup_steps=1000", "train.warmup_steps=1000; set "),
    ("sft published --data chat.jsonl --output out --set model.num_layers=3", "model.num_layers=2 there, 3 here. Set what it was made"),
    ("sft bare --data chat.jsonl --output out", "error: bare holds no tokenizer.json; set data.tokenizer to the folder of this model's"),
    ("sft bytes --data chat.jsonl --output out", "error: bytes holds no tokenizer.json; set data.tokenizer to the folder of this model"),
    ("sft bytes --data chat.jsonl --output out --set data.tokenizer=byte", "data.tokenizer='byte' has no tokenizer.json, which convers"),
    ("sft published --data chat.jsonl --output out --set data.tokenizer=no", "data.tokenizer='no' holds no tokenizer.json; set data.to"),
    ("sft cut --data chat.jsonl --output out", "model.safetensors: not a sound safetensors file"),
    ("distill --recipe gpt_tiny --teacher gpt_tny", "did you mean 'gpt_tiny'?"),
    (f"distill --recipe gpt_tiny --teacher gpt_tiny {STUDENT} --set teacher.output=nothing", "teacher.output='nothing' holds no "),
    (f"distill --recipe gpt_tiny --teacher gpt_tiny {STUDENT} --set store=text.txt", "text.txt"),
    (f"distill --recipe gpt_tiny --teacher gpt_tiny {STUDENT} --set temperature=0", "temperature=0.0 must be above 0"),
    (f"distill --recipe gpt_tiny --teacher gpt_tiny {STUDENT} --set teacher.model.vocab_size=64", "set student.model.vocab_size=64"),
    ("rl", "there is neither MODEL nor --recipe nor --config. Recipes that learn from rewards: "),
    ("rl published --set output=text.txt", "output='text.txt' can be no folder: "),
    ("rl published --set output=out --set rl.environment=nothing", "environment='nothing' must be one of countdown"),
    ("rl published --set output=out --set rl.environment=maths --set rl.maths.path=nothing", "maths.path='nothing' is no file; name"),
    ("rl published --set output=out --layout qwen3_0_6b@8", "plan.dp=8 * plan.pp=1 = 8 ranks, but the world has 1; lower a degree, or"),
    ("rl published --set output=out --set rl.group_size=1", "group_size=1 must be at least 2"),
    (f"eagle train --recipe gpt_tiny {HEAD} --set target.output=nothing", "target.output='nothing' holds no checkpoint; train"),
    ("eagle train --recipe gpt_tiny --set head=nothing.json", "head='nothing.json' is no file; name "),
    ("eagle train --recipe gpt_tiny --set num_steps=0", "num_steps=0 must be at least 1"),
    ("eagle train --recipe bert_tiny --target gpt_tiny", "run must predict the next token; set run.masked=none"),
    ("eagle train --recipe t5_tiny --target gpt_tiny", "run must predict the next token; set run.spans=none"),
    ("eagle train --recipe gpt_tiny --target bert_tiny", "target must predict the next token; set target.masked=none"),
    ("eagle train --recipe gpt_tiny --set run.fp8.recipe=rowwise", "layers of a model, and no head follows it; set run.fp8=none"),
    ("eagle train --recipe gpt_tiny --set run.recompute.granularity=full", "set run.recompute=none"),
    ("eagle train --recipe gpt_tiny --set run.offload.modules=[mlp]", "set run.offload=none"),
    ("eagle train --recipe gpt_tiny --set run.batch_invariant=true", "run.batch_invariant=True is for the layers of a model, and no head "),
    ("eagle train --recipe gpt_tiny --set run.backend=te", "run.backend=te is for the layers of a model, and no head follows it; set run."),
    ("eval published", "there is nothing to measure; give --text FILE, --choices FILE or --tasks NAMES"),
    ("eval published --text chat.jsonl", 'chat.jsonl:1 must be an object with a string "text"'),
    ("eval published --choices text.txt", "text.txt:1: Expecting value: line 1 column 1 (char 0); correct the line"),
    ("eval published --text empty.jsonl", "empty.jsonl holds no text; name a file that does"),
    ("eval published --choices empty.jsonl", "empty.jsonl holds no question; give each a line with question, choices and answer"),
    ("eval published --text half.bin", "half.bin is not UTF-8: byte 0xff at 2; convert it"),
    ("eval tokenizer --text text.txt", "tokenizer is not a checkpoint: it has no manifest.json"),
    ("generate text.txt --prompt x", "text.txt is not a checkpoint: it is a file"),
    ("generate cut --prompt x", "not a sound safetensors file"),
    ("generate published --prompt x --kv-cache-dtype int4", "invalid choice: 'int4' (choose from"),
    ("generate published --prompt x --weight-dtype int4", "invalid choice: 'int4' (choose from"),
    ("generate published --prompt x --max-tokens 257", "--max-tokens 257 exceeds the 256 tokens of a prompt and its continuation; lowe"),
    ("generate published --prompt x --max-length 257", "--max-length 257 exceeds max_position_embeddings=256 of published; lower it"),
    ("chat published --max-length 257", "--max-length 257 exceeds max_position_embeddings=256 of published; lower it"),
    ("serve published --port 0 --max-length 257", "--max-length 257 exceeds max_position_embeddings=256 of published; lower it"),
    ("chat nothing", "nothing is not a checkpoint: there is no such folder"),
    ("chat http://127.0.0.1:9", "does not answer: [Errno 111] Connection refused; is `mcore serve` up?"),
    ("chat published --model x", "--model and --token-file are for a server, and published is no http:// address; leave them out"),
    ("serve foreign --port 0", "config.json: model_type='rwkv' is none of "),
    ("serve published --port 99999", "--port: 99999 must be 0 to 65535; mcore serve --help"),
    ("serve published --host 0.0.0.0", "give --token-file, or --host 127.0.0.1"),
    ("serve published --max-tokens 8", "--max-tokens is of --prompt; give both, or leave it out"),
    ("serve published --temperature 0", "--temperature is of --prompt; give both, or leave it out"),
    ("serve published --seed 1", "--seed is of --prompt; give both, or leave it out"),
    ("serve published --bad-word x", "--bad-word is of --prompt; give both, or leave it out"),
    ("serve published --name me", "--name is of --join; give both, or leave it out"),
    ("serve published --name me --prompt x", "--name is of --join; give both, or leave it out"),
    ("serve published --max-tokens 8 --join tcp://127.0.0.1:9", "--max-tokens is of --prompt; give both, or leave it out"),
    ("serve published --prompt x --join tcp://127.0.0.1:9", "--prompt and --join exclude each other: one continues texts and ends"),
    *((f"serve published --prompt x {flag}", f"{flag.split()[0]} is of a server over HTTP, and --prompt starts none") for flag in OF_HTTP),
    *((f"serve published --prompt x {flag}", f"{flag.split()[0]} is of a server") for flag in ("--max-waiting 8", "--stall-seconds 8")),
    # Engines that join a job drain, too.
    *(
        (f"serve published --join tcp://127.0.0.1:9 {flag}", f"{flag.split()[0]} is of a server over HTTP, and --join")
        for flag in OF_HTTP
        if not flag.startswith("--drain-seconds")
    ),
    ("convert import x out", "invalid choice: 'import' (choose from"),
    ("convert import-hf published published", "published exists and is not an empty folder; choose another or remove it"),
    ("convert import-hf foreign out", "config.json: model_type='rwkv' is none of "),
    ("convert export-hf published out", "config.json means a Hugging Face folder, of which import-hf makes a checkpoint"),
    ("convert export-hf t5 out", "t5 holds no layers.*, as every family has: no family is an encoder with a decoder, and other names"),
    ("convert export-megatron t5 out", "t5 holds no layers of a GPT model (layers.*), and only these have names there; export a run wi"),
    ("convert import-hf text.txt out", "there is no folder text.txt; name the folder of a Hugging Face model"),
    ("convert inspect tokenizer", "tokenizer is not a checkpoint: it has no manifest.json"),
    (f"plan --model nothing {LAYOUT}", "model='nothing' has no config.json, and is no preset; there are "),
    (f"plan --model llama3-8b hidden_sise=1 {LAYOUT}", "hidden_sise=1 names no field of a model; did you mean hidden_size?"),
    (f"plan --model llama3-8b {LAYOUT} --fix tp=3", "gpus=8 with tp=3 divide neither the model nor global_batch=64; change "),
    ("plan --model published --gpus eight --sequence 1 --global-batch 1", "--gpus: invalid int value: 'eight'; mcore-plan --help"),
    ("doctor --jsn", "unrecognized arguments: --jsn; mcore-doctor --help lists what there is"),
    ("doctor published", "unrecognized arguments: published; mcore-doctor --help lists what there is"),
    ("doctor --json=yes", "--json: ignored explicit argument 'yes'; mcore-doctor --help lists what there is"),
    ("completion", "the following arguments are required: shell; mcore completion --help"),
    ("completion bahs", "invalid choice: 'bahs' (choose from"),
    ("completion bash zsh", "unrecognized arguments: zsh; mcore completion --help"),
    ("compare nothing nothing", "nothing holds no .safetensors file; pass the folder that TensorRecorder wrote"),
    ("compare published", "the following arguments are required: reference; mcore-compare --help lists what there is"),
    ("compare published published --dtype int8", "--dtype: invalid choice: 'int8' (choose from"),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model, whole, cut and of an unknown family; conversations, text, and a corpus with its tokenizer."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_published(folder / "published")
    for name in ("broken", "cut", "foreign"):
        shutil.copytree(folder / "published", folder / name)
    os.truncate(folder / "cut" / "model.safetensors", 1000)
    config = json.loads((folder / "foreign" / "config.json").read_text())
    (folder / "foreign" / "config.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    (folder / "broken" / "config.json").write_text("{")
    shutil.copytree(folder / "published", folder / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    save({"x": torch.zeros(1)}, folder / "bytes", assets={"run.yaml": config_text(recipe("gpt_tiny")).encode()})
    save({"embedding.weight": torch.zeros(1), "decoder.0.own.attention.out.weight": torch.zeros(1)}, folder / "t5")
    write_chat(folder / "chat.jsonl")
    (folder / "half.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    (folder / "alien.jsonl").write_text('{"messages": [{"role": "alien", "content": "x"}]}\n')
    (folder / "half.bin").write_bytes(b"ab\xff")
    write_corpus(folder, "to be or not to be, that is the question. ")
    (folder / "text.txt").write_text("to be or not to be")
    (folder / "text.jsonl").write_text('{"text": "to be"}\n')
    (folder / "empty.jsonl").write_text("\n")
    (folder / "torn.yaml").write_text("train: [")
    (folder / "list.yaml").write_text("- train\n")
    return folder


def test_each_verb_is_tried_with_three_mistakes() -> None:
    tried = [line.split()[0] for line, _ in MISTAKES]
    assert {name: tried.count(name) for name in VERBS if tried.count(name) < 3} == {}


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line_with_its_remedy(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    monkeypatch.chdir(place)
    for name in ("transformer_engine", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    assert_refused(place, capsys, line, words)


IDLE = [
    (f"train --recipe gpt_tiny {CORPUS}", 2, "plan.dp=1 * plan.pp=1 = 1 ranks, but the world has 2; set plan.dp=2, or start 1 with "),
    (f"train --recipe gpt_tiny {CORPUS} --set plan.tp=2 --set plan.dp=2", 8, "= 4 ranks, but the world has 8; set plan.dp=4, or start 4"),
    (f"train --recipe gpt_tiny {CORPUS} --set plan.tp=2", 3, "= 2 ranks, but the world has 3; raise a degree, or start 2 with torchrun"),
    ("sft published --data chat.jsonl --output out", 2, "= 1 ranks, but the world has 2; set plan.dp=2, or start 1 with torchrun"),
    ("rl published --set output=out", 2, "= 1 ranks, but the world has 2; set plan.dp=2, or start 1 with torchrun"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "num_ranks", "words"), IDLE)
def test_a_plan_that_leaves_ranks_idle_is_refused_before_they_meet(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, num_ranks: int, words: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    assert_refused(place, capsys, line, words)


def test_a_plan_that_leaves_ranks_idle_is_named_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = override(recipe("gpt_tiny"), [f"output={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match=r"^student\.plan\.tp=1 .* the world has 2; set student\.plan\.dp=2, or start 1 with torchrun$"):
        check_run(config, "student.")


def assert_refused(place: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    try:
        ended = main(line.split())
    except SystemExit as end:
        ended = end.code
    message = capsys.readouterr().err
    assert ended == 2, message
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message, message
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
