# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of PEFT's folders and of runs beside one served model: requests name them, and each answers as the model it is merged into."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore

from mcore_ckpt import CheckpointingException, save
from mcore_ckpt.hf import HFAdapterConfig, export_adapter_hf, import_hf, merge_adapter_hf
from mcore_inference import LoraSlots, LoraWeights, SamplingParams
from mcore_inference.coordinator._messages import MAX_LORAS
from mcore_tools import cli, sft
from mcore_tools.evaluation import Scorer
from mcore_tools.serve import MOST_LORAS, main
from mcore_tools.serving import EngineLayout, EngineRanks, open_engine, read_lora, slots_for
from mcore_tools.terminal import AnswerSettings, EngineAnswers
from tests.support.checkpoints import tiny_checkpoint
from tests.support.commands import Command
from tests.support.published import write_chat, write_published

PROMPT = "which fruit is"
CHAT = [{"role": "user", "content": "which fruit is red?"}]
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=8, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("published") / "llama", initializer_range=0.2)


def write_adapter(base: Path, folder: Path, rank: int, seed: int, parts: Sequence[str]) -> Path:
    """In PEFT's format, with random numbers."""
    family, config, tensors = import_hf(base)
    generator, ours = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors:
        if name.startswith("layers.") and name.removesuffix(".weight").rpartition(".")[2] in parts:
            stem = name.removesuffix(".weight")
            ours[f"{stem}.lora.A"] = torch.randn(rank, tensor.shape[-1], generator=generator) * 0.3
            ours[f"{stem}.lora.B"] = torch.randn(*tensor.shape[:-1], rank, generator=generator) * 0.3
    settings = HFAdapterConfig(rank=rank, alpha=2.0 * rank, base_model=str(base))
    export_adapter_hf(ours, folder, family=family, config=config, adapter=settings)
    return folder


def spread(folder: Path) -> Path:
    """As PEFT trains an adapter: q, k and v have matrices A of their own."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.lora_A.weight", "v_proj.lora_A.weight")):
            tensors[name] = tensor.flip(1).contiguous()
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two adapters in PEFT's format, and of a run that trained one."""
    place = tmp_path_factory.mktemp("adapters")
    write_adapter(base, place / "sql", 2, 1, ("qkv", "out", "up", "down"))
    spread(write_adapter(base, place / "chat", 3, 2, ("qkv", "out")))
    chat = write_chat(place / "chat.jsonl", 8)
    changes = ("lora.rank=4", "lora.targets=[qkv, down]", "train.seq_len=128", "train.global_batch_size=4", "train.steps=2")
    changes += ("optimizer.lr=1", "train.eval_interval=0", "sft.export=adapter", "log.html=false", "log.tensorboard=false")
    sets = [word for change in changes for word in ("--set", change)]
    assert sft.main([str(base), "--data", str(chat), "--output", str(place / "run"), *sets]) == 0
    return place


@pytest.fixture(scope="module")
def texts(base: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What models with merged weights say behind the prompt; of the base by an empty name."""
    place, generated = tmp_path_factory.mktemp("merged"), {}
    for name, folder in (("", ""), ("sql", "sql"), ("chat", "chat"), ("run", "run/adapter")):
        if name:
            merge_adapter_hf(base, adapters / folder, place / name)
        engine = open_engine(place / name if name else base, "cpu", cache_gb=0.01)
        generated[name] = engine.generate([PROMPT], GREEDY)[0].generated_text
    assert len(set(generated.values())) == 4
    return generated


def test_folders_of_adapters_are_read_for_the_model_that_is_served(base: Path, adapters: Path, texts: dict[str, str]) -> None:
    places = {"sql": adapters / "sql", "chat": adapters / "chat", "run": adapters / "run"}
    loras = {name: read_lora(base, place) for name, place in places.items()}
    # That of q, k and v has their ranks together.
    assert {name: weights.rank for name, weights in loras.items()} == {"sql": 2, "chat": 9, "run": 4}
    slots = slots_for(loras)
    assert (slots.max_loras, slots.max_lora_rank, slots.targets) == (3, 9, ("down", "out", "qkv", "up"))
    engine = open_engine(base, "cpu", cache_gb=0.01, loras=loras)
    names = [None, "sql", "chat", "run"]
    records = engine.generate([PROMPT] * 4, GREEDY, lora=names)
    assert [record.generated_text for record in records] == [texts[name or ""] for name in names]
    for same in (adapters / "run" / "checkpoints", adapters / "run" / "checkpoints" / "step_00000002", adapters / "run" / "adapter"):
        again = read_lora(base, same)
        assert (again.rank, again.alpha) == (4, 32.0) and again.matrices.keys() == loras["run"].matrices.keys()
        assert all(
            torch.equal(a, b) for name, pair in again.matrices.items() for a, b in zip(pair, loras["run"].matrices[name], strict=True)
        )


def test_ranks_that_read_different_adapters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that trains each rank finds the newest step by itself."""
    layout = EngineLayout(tp=2)
    adapters = [
        LoraWeights(rank=1, alpha=1.0, matrices={"layers.0.mlp.up": (torch.ones(1, 3), torch.full((2, 1), at))}) for at in (0.5, 1.5)
    ]

    def check(rank: int, loras: dict[str, LoraWeights]) -> str:
        try:
            ranks[rank].check_adapters(loras)
        except ValueError as error:
            return str(error)
        return ""

    for different, reason in (
        (0, ""),
        (1, "the ranks of the engine have read different adapters, such as of a run that trains; name a step"),
    ):
        ranks, store = [], HashStore()
        for rank in range(2):
            for name, value in (("RANK", rank), ("WORLD_SIZE", 2)):
                monkeypatch.setenv(name, str(value))
            ranks.append(EngineRanks(layout, []))
            ranks[rank]._store = store
        with ThreadPoolExecutor(2) as pool:
            messages = list(pool.map(check, range(2), [{"sql": adapters[0]}, {"sql": adapters[different]}]))
        assert all(text.startswith(reason) and bool(text) == bool(reason) for text in messages), messages


def test_what_is_no_adapter_of_the_model_is_refused_by_name(base: Path, adapters: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException):
        read_lora(base, tmp_path)
    with pytest.raises(ValueError, match=r"holds adapters of .*; serve that model, and name .* as an adapter of it"):
        read_lora(adapters / "run", adapters / "sql")
    other = write_published(tmp_path / "wide", hidden_size=128)
    with pytest.raises(CheckpointingException, match="does not fit"):
        read_lora(other, adapters / "sql")
    dora = shutil.copytree(adapters / "sql", tmp_path / "dora")
    entries = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps({**entries, "use_dora": True}))
    with pytest.raises(CheckpointingException, match="use_dora"):
        read_lora(base, dora)


def test_prompts_go_through_an_adapter(
    base: Path, adapters: Path, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(base), "--cache-gb", "0.01", "--max-tokens", "8", "--ignore-eos"]
    for name in ("chat", "run"):
        assert cli.main([*words, "--prompt", PROMPT, "--lora", str(adapters / name)]) == 0
        assert capsys.readouterr().out == f"{PROMPT}{texts[name]}\n"
    source, target = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    source.write_text(f"{PROMPT}\n")
    files = [*words, "--input", str(source), "--output", str(target)]
    assert cli.main([*files, "--lora", str(adapters / "sql")]) == 0
    assert json.loads(target.read_text())["text"] == texts["sql"]
    capsys.readouterr()
    source.write_text(f"{PROMPT}\nmore\n")
    assert cli.main(files) == 2
    assert f"--lora is None, and was {(adapters / 'sql').resolve()} for the texts" in capsys.readouterr().err
    served = ["serve", str(base), "--cache-gb", "0.01", "--max-tokens", "8", "--ignore-eos", "--prompt", PROMPT]
    assert cli.main([*served, "--lora", f"sql={adapters / 'sql'}"]) == 0
    assert capsys.readouterr().out == f"{PROMPT}{texts['sql']}\n"


@pytest.mark.journey
@pytest.mark.timeout(120)
def test_prompts_go_through_an_adapter_of_an_engine_elsewhere(
    base: Path, adapters: Path, texts: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_COORDINATOR", "1")
    words = ["generate", str(base), "--cache-gb", "0.01", "--max-tokens", "8", "--ignore-eos", "--prompt", PROMPT]
    assert cli.main([*words, "--lora", str(adapters / "chat")]) == 0
    assert capsys.readouterr().out == f"{PROMPT}{texts['chat']}\n"


def test_conversations_and_measures_go_through_an_adapter(base: Path, adapters: Path, tmp_path: Path) -> None:
    lora = read_lora(base, adapters / "sql")
    engine = open_engine(base, "cpu", cache_gb=0.01, loras={"sql": lora})
    merge_adapter_hf(base, adapters / "sql", tmp_path / "merged")
    whole = open_engine(tmp_path / "merged", "cpu", cache_gb=0.01)
    settings = AnswerSettings(max_tokens=8, temperature=0.0)
    streamed = ["".join(answers.stream(CHAT)) for answers in (EngineAnswers(engine, settings, "sql"), EngineAnswers(whole, settings))]
    assert streamed[0] == streamed[1] != "".join(EngineAnswers(engine, settings).stream(CHAT))
    pairs = [([1, 2, 3], [4, 5, 6]), ([7], [8])]
    ours, merged, plain = (scorer.log_probs(pairs) for scorer in (Scorer(engine, "sql"), Scorer(whole), Scorer(engine)))
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(merged[0]), rtol=1e-4, atol=1e-4)
    assert abs(ours[0][0] - plain[0][0]) > 1e-2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--lora sql", "'sql' must be NAME=FOLDER"),
        ("--lora =SQL", "must be NAME=FOLDER, a name of 1 to 256 characters"),
        ("--lora sql=nowhere", "'nowhere' is no folder"),
        ("--lora sql=RUN/hf", "is no folder"),
        ("--lora a=SQL --lora a=CHAT", "--lora names 'a' twice"),
        ("--lora llama=SQL", "--lora llama=... has the name of the model"),
        ("--lora a=SQL --lora b=CHAT --max-loras 1", "--max-loras 1 is less than the 2 adapters of --lora; raise it"),
        ("--lora b=CHAT --max-lora-rank 8", "--max-lora-rank 8 is less than the rank 9 of an adapter of --lora"),
        ("--lora a=SQL --lora-targets qkv,out", "the adapter a: layers.0.mlp.up has no slots"),
        ("--lora-targets qkv,best", "--lora-targets: targets='best' is no linear layer"),
        ("--max-loras 0", "--max-loras: 0 must be 1 to 1024"),
        ("--data-parallel 2 --max-loras 129", "--max-loras 129 is more than the 128 adapters that a coordinator keeps; lower it"),
        ("--lora a=BASE", "holds a whole model; name the folder of an adapter"),
        ("--lora a=SQL --lora b=CHAT --prompt x", "--prompt goes through one adapter, and --lora names 2; give one"),
        ("--lora a=SQL --join tcp://127.0.0.1:1", "--lora is of a server, whose coordinator brings adapters to engines that join it"),
        ("--lora-folder FOLDER", "--lora-folder lets a client of the server replace the model; give --token-file"),
        ("--lora-folder FOLDER --prompt x", "--lora-folder is of a server over HTTP, and --prompt starts none"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused_before_a_port_opens(
    words: str, reason: str, base: Path, adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"SQL": adapters / "sql", "CHAT": adapters / "chat", "RUN": adapters / "run", "BASE": base, "FOLDER": adapters}
    for name, place in places.items():
        words = words.replace(name, str(place))
    port = [] if "--prompt" in words or "--join" in words else ["--port", "0"]
    try:
        code = cli.main(["serve", str(base), *port, "--cache-gb", "0.01", *words.split(" ")])
    except SystemExit as end:
        code = end.code
    assert code == 2 and reason in capsys.readouterr().err


def test_the_command_knows_how_many_adapters_a_coordinator_keeps() -> None:
    assert MOST_LORAS == MAX_LORAS


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("layers.0.attention.kv_up", "targets='kv_up' is absorbed into queries"),
        ("layers.0.mlp.shared_experts.up", "they are beside mixers and feed-forwards without experts"),
        ("mtp.layers.0.attention.qkv", "they are beside mixers"),
    ],
)
def test_an_adapter_of_a_layer_without_slots_is_named(
    layer: str, why: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "absorbed"
    halves = {f"{layer}.lora.A": torch.ones(1, 4), f"{layer}.lora.B": torch.ones(4, 1)}
    save(halves, place, extra={"lora": {"rank": 1, "alpha": 1.0}, "lora_base": str(base)})
    reason = f"{place} has an adapter of {layer}, for which an engine has no slots: {why}"
    for verb, flag, before in (("serve", f"sql={place}", f"--lora sql={place}: "), ("generate", str(place), "")):
        assert cli.main([verb, str(base), "--prompt", PROMPT, "--lora", flag]) == 2
        assert f"error: {before}{reason}" in capsys.readouterr().err


def test_slots_of_a_mixture_are_beside_its_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = str(tiny_checkpoint(tmp_path, "which fruit is red? ", "moe_tiny"))
    words = ["serve", mixture, "--cache-gb", "0.01", "--prompt", PROMPT, "--max-tokens", "2", "--ignore-eos"]
    for given in (["--max-loras", "2"], ["--max-lora-rank", "3"], ["--lora-targets", "out"]):
        assert cli.main([*words, *given]) == 0, capsys.readouterr().err
    capsys.readouterr()
    monkeypatch.setattr("mcore_tools.generate.open_engine", lambda *_, **__: pytest.fail("loaded"))
    for more in ([], ["--tp", "2"]):
        assert cli.main([*words, "--lora-targets", "qkv,up", *more]) == 2
        assert "--lora-targets: targets='up' of LoraSlots names no linear layer of this model" in capsys.readouterr().err
    # Whoever opens the engine.
    monkeypatch.setattr("mcore_tools.serving._open.fill_model", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match="targets='up' of LoraSlots names no linear layer"):
        open_engine(mixture, "cpu", cache_gb=0.01, sizes={"lora": LoraSlots(targets=("up",))})


def test_adapters_have_no_place_beside_a_run_that_is_merged(adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("secret")
    guarded = ["--lora-folder", str(adapters), "--token-file", str(tmp_path / "secret")]
    for words in (guarded, ["--lora", f"sql={adapters / 'sql'}"]):
        assert cli.main(["serve", str(adapters / "run"), "--port", "0", *words]) == 2
        assert "into which they are merged when it is served; serve that model" in capsys.readouterr().err


def ask(url: str, call: str, **body: Any) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {'operator' if 'lora_adapter' in call else 'secret'}"}
    request = urllib.request.Request(f"{url}/{call}", json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "more",
    [
        ["0"],
        pytest.param(["0", "--tp", "2"], marks=pytest.mark.journey),
        pytest.param(["1", "--data-parallel", "2", "--api-server-count", "2"], marks=pytest.mark.journey),
    ],
    ids=["alone", "split", "many"],
)
def test_a_server_answers_by_the_adapters_of_its_command_and_of_its_folder(
    more: list[str], base: Path, adapters: Path, texts: dict[str, str], tmp_path: Path
) -> None:
    for name in ("secret", "operator"):
        (tmp_path / name).write_text(name)
    words = [str(base), "--port", "0", "--cache-gb", "0.01", "--token-file", str(tmp_path / "secret"), "--lora-folder", str(adapters)]
    words += [
        "--weights-token-file",
        str(tmp_path / "operator"),
        "--lora",
        f"sql={adapters / 'sql'}",
        "--lora",
        f"chat={adapters / 'chat'}",
    ]
    with Command(main, [*words, *more[1:]], {"USE_COORDINATOR": more[0]}) as command:
        url = command.until("serving ", 120.0).split(" on ")[1].split(";")[0]
        models = {model["id"]: model["parent"] for model in ask(url, "models")["data"]}
        assert models == {"llama": None, "sql": "llama", "chat": "llama"}

        def say(model: str) -> Any:
            answer = ask(url, "completions", model=model, prompt=PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
            return answer["choices"][0]["text"] if isinstance(answer, dict) else answer

        # Each several times: engines and servers take turns.
        for _ in range(3):
            assert [say(name) for name in ("llama", "sql", "chat")] == [texts[name] for name in ("", "sql", "chat")]
        assert say("run")[0] == 404
        assert ask(url, "load_lora_adapter", lora_name="run", lora_path="run")["success"] is True
        for _ in range(4):
            assert say("run") == texts["run"] and say("") == texts[""]
        assert ask(url, "unload_lora_adapter", lora_name="sql")["success"] is True
        for _ in range(4):
            assert say("sql")[0] == 404 and say("chat") == texts["chat"]
        command.terminate()
        assert command.wait() == 0, command.errors
