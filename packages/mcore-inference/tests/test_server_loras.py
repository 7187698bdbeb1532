# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A server answers by the adapter that a request names as its model, and takes adapters from folders while it runs."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from mcore_inference import DynamicInferenceEngine, EngineRunner, LoraSlots, LoraWeights, SamplingParams
from mcore_inference.coordinator import CoordinatedRunner, DataParallelInferenceCoordinator, EngineWorker
from mcore_inference.server import InferenceServer, LoraFolders, serve, serve_runner
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel
from tests.support.adapters import merged, random_adapter

Make = Callable[..., Any]
TOKEN = {"Authorization": "Bearer secret"}
SLOTS = LoraSlots(max_loras=3, max_lora_rank=4)
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=12, ignore_eos=True)
PROMPT = list(b"select")


@pytest.fixture(scope="module")
def model(make_model: Make) -> GPTModel:
    return make_model(vocab_size=272, dtype=torch.float64, layers=2).eval()


@pytest.fixture(scope="module")
def adapters(model: GPTModel) -> dict[str, LoraWeights]:
    """By the names of folders."""
    wide = random_adapter(model, 8, 5)
    ours = {name: random_adapter(model, rank, rank) for name, rank in (("sql", 2), ("chat", 4), ("code", 3))}
    one = dict(list(ours["sql"].matrices.items())[:1])
    other = {name: (A, B[..., :1, :]) for name, (A, B) in one.items()}
    return {**ours, "wide": wide, "other": LoraWeights(rank=2, alpha=2.0, matrices=other)}


@pytest.fixture(scope="module")
def texts(model: GPTModel, adapters: dict[str, LoraWeights], make_engine: Make) -> dict[str | None, list[int]]:
    """What models with merged weights generate."""
    tokens_of: dict[str | None, list[int]] = {}
    for name in (None, "sql", "chat", "code"):
        engine = make_engine(merged(model, None if name is None else adapters[name]), ByteTokenizer())
        tokens_of[name] = engine.generate([PROMPT], GREEDY)[0].generated_tokens
    assert len({tuple(tokens) for tokens in tokens_of.values()}) == 4
    return tokens_of


@pytest.fixture(scope="module")
def root(adapters: dict[str, LoraWeights], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    for name in (*adapters, "empty"):
        (place / name).mkdir()
    return place


@pytest.fixture
def folders(root: Path, adapters: dict[str, LoraWeights]) -> LoraFolders:
    return LoraFolders(root=root, read=lambda folder: adapters[folder.name])


@pytest.fixture
def engine(model: GPTModel, make_engine: Make) -> DynamicInferenceEngine:
    return make_engine(model, ByteTokenizer(), lora=SLOTS)


@pytest.fixture
def server(engine: DynamicInferenceEngine, folders: LoraFolders) -> Iterator[InferenceServer]:
    with serve(engine, token="secret", model_name="base", loras=folders) as running:
        yield running


def change(server: InferenceServer, call: str, *, token: str = "secret", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{server.url}/v1/{call}_lora_adapter", json=body, headers=headers, timeout=30)


def complete(server: InferenceServer, model: str, prompt: Any = PROMPT, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=TOKEN, timeout=30)


def tokens(server: InferenceServer, model: str) -> list[int]:
    response = complete(server, model)
    assert response.status_code == 200 and response.json()["model"] == (model or "base"), response.text
    return response.json()["choices"][0]["token_ids"]


def listed(server: InferenceServer) -> list[tuple[str, str | None]]:
    answer = httpx.get(f"{server.url}/v1/models", headers=TOKEN).json()
    return [(model["id"], model["parent"]) for model in answer["data"]]


def check_lives(server: InferenceServer, texts: dict[str | None, list[int]]) -> None:
    """Adapters are loaded, answer beside each other and the model, and are unloaded."""
    assert listed(server) == [("base", None)]
    refused = complete(server, "sql")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    for name in ("sql", "chat"):
        response = change(server, "load", lora_name=name, lora_path=name)
        assert response.status_code == 200 and response.json()["success"] is True, response.text
        # Whoever loaded it names it at once.
        assert tokens(server, name) == texts[name]
    assert listed(server) == [("base", None), ("sql", "base"), ("chat", "base")]
    url = f"{server.url}/v1/models"
    assert httpx.get(f"{url}/chat", headers=TOKEN).json()["parent"] == "base"
    assert httpx.get(f"{url}/code", headers=TOKEN).status_code == 404
    with ThreadPoolExecutor(8) as pool:
        names = ["sql", "base", "chat", ""] * 4
        assert list(pool.map(lambda name: tokens(server, name), names)) == [texts[name if name in texts else None] for name in names]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=30) as client:
        assert [model.id for model in client.models.list()] == ["base", "sql", "chat"]
        settings: Any = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
        asked_by: Any = {"messages": [{"role": "user", "content": "select"}], **settings}
        answers = {name: client.chat.completions.create(model=name, **asked_by) for name in ("base", "sql", "chat")}
        assert {name: answer.model for name, answer in answers.items()} == {name: name for name in answers}
        chunks = list(client.chat.completions.create(model="sql", stream=True, **asked_by))
        assert {chunk.model for chunk in chunks} == {"sql"}
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == answers["sql"].choices[0].message.content != answers["base"].choices[0].message.content
        with pytest.raises(
            openai.NotFoundError, match="model='code' is not served here; the model is 'base', its adapters are 'sql', 'chat'"
        ):
            client.completions.create(model="code", prompt="x")
    assert change(server, "unload", lora_name="sql", lora_int_id=1).status_code == 200
    assert complete(server, "sql").status_code == 404 and listed(server) == [("base", None), ("chat", "base")]
    # The name may come again, for another adapter, which the cached beginnings of the first do not serve.
    assert change(server, "load", lora_name="sql", lora_path="code", lora_int_id=2, load_inplace=False).status_code == 200
    assert tokens(server, "sql") == texts["code"] and tokens(server, "chat") == texts["chat"] and tokens(server, "base") == texts[None]


def test_adapters_come_answer_beside_each_other_and_go(server: InferenceServer, texts: dict[str | None, list[int]]) -> None:
    check_lives(server, texts)
    document = httpx.get(f"{server.url}/openapi.json", headers=TOKEN).json()
    assert {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"} < document["paths"].keys()
    assert document["components"]["schemas"]["CompletionBody"]["properties"]["model"]["enum"] == ["", "base", "chat", "sql"]
    # Of texts and weights the model is meant.
    body = {"model": "sql", "prompt": "x"}
    assert httpx.post(f"{server.url}/tokenize", json=body, headers=TOKEN).json()["count"] == 1


def test_adapters_of_engines_behind_a_coordinator_come_and_go_for_all_servers(
    model: GPTModel, folders: LoraFolders, make_engine: Make, texts: dict[str | None, list[int]]
) -> None:
    def made() -> DynamicInferenceEngine:
        # Each has a thread of its own, and its layers have its adapters while it steps.
        return make_engine(copy.deepcopy(model), ByteTokenizer(), lora=SLOTS)

    with DataParallelInferenceCoordinator() as coordinator, ExitStack() as stack:
        runners = [stack.enter_context(EngineRunner(made())) for _ in range(3)]
        workers = [stack.enter_context(EngineWorker(runner, coordinator.address, name=f"dp-{at}")) for at, runner in enumerate(runners[:2])]
        coordinator.wait_for_engines(2)
        first, second = (
            stack.enter_context(
                serve_runner(
                    lambda: CoordinatedRunner(coordinator.address), ByteTokenizer(), token="secret", model_name="base", loras=folders
                )
            )
            for _ in range(2)
        )
        check_lives(first, texts)
        assert [runner.loras for runner in runners] == [("chat", "sql"), ("chat", "sql"), ()]
        # Another server asks for a name that it does not know, and knows one that is gone.
        assert change(first, "load", lora_name="new", lora_path="sql").status_code == 200
        assert tokens(second, "new") == texts["sql"]
        assert change(second, "unload", lora_name="chat").status_code == 200
        gone = complete(first, "chat")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        # A later engine serves alone, by the adapters of those that are gone.
        stack.enter_context(EngineWorker(runners[2], coordinator.address, name="dp-2"))
        coordinator.wait_for_engines(3)
        for worker in workers:
            worker.close()
        assert tokens(first, "sql") == texts["code"] and tokens(second, "new") == texts["sql"] and tokens(first, "") == texts[None]
        assert runners[2].loras == ("sql", "new")


def test_what_is_no_adapter_for_this_model_changes_nothing(
    server: InferenceServer, root: Path, tmp_path: Path, texts: dict[str | None, list[int]]
) -> None:
    assert change(server, "load", lora_name="sql", lora_path="sql").status_code == 200
    outside = tmp_path / "sql"
    outside.mkdir()
    (root / "circle").symlink_to(root / "circle")
    (root / "out").symlink_to(outside)
    # In the same words, whether it is there or not.
    for path in (outside, tmp_path / "nowhere", root, "nowhere", "..", "../nowhere", "a\0b", "circle", "out", "sql\0", "x" * 4000):
        refused = change(server, "load", lora_name="x", lora_path=str(path))
        assert refused.status_code == 400, path
        assert refused.json()["error"]["message"] == f"lora_path={str(path)!r} is no folder below {root}"
    for name in ("circle", "out"):
        (root / name).unlink()
    cases = {
        ("x", "empty"): "holds no adapter for this model",
        ("x", "wide"): "rank",
        ("x", "other"): "layers.0.attention.qkv",
        ("sql", "chat"): "sql",
        ("base", "chat"): "lora_name='base' is the model's",
    }
    for (name, folder), reason in cases.items():
        refused = change(server, "load", lora_name=name, lora_path=folder)
        assert refused.status_code == 400 and reason in refused.json()["error"]["message"], (name, folder, refused.text)
        assert refused.json()["error"]["param"] == ("lora_path" if name == "x" else "lora_name")
    for name in (" x", "x\n", "x\u200b"):
        for call, more in (("load", {"lora_path": "chat"}), ("unload", {})):
            refused = change(server, call, lora_name=name, **more)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name"), refused.text
    inplace = change(server, "load", lora_name="sql", lora_path="chat", load_inplace=True)
    assert (inplace.status_code, inplace.json()["error"]["param"]) == (422, "load_inplace")
    for body in ({"lora_name": "x"}, {"lora_name": "", "lora_path": "chat"}, {"lora_name": "x", "lora_path": "chat", "more": 1}):
        assert change(server, "load", **body).status_code == 422
    unknown = change(server, "unload", lora_name="chat")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "lora_name")
    for name in ("chat", "code"):
        assert change(server, "load", lora_name=name, lora_path=name).status_code == 200
    full = change(server, "load", lora_name="x", lora_path="sql")
    assert full.status_code == 400 and "3" in full.json()["error"]["message"]
    assert [name for name, _ in listed(server)] == ["base", "sql", "chat", "code"]
    assert {name: tokens(server, name or "") for name in texts} == texts


def test_an_adapter_in_use_is_unloaded_when_its_last_answer_has_ended(engine: DynamicInferenceEngine, server: InferenceServer) -> None:
    assert change(server, "load", lora_name="sql", lora_path="sql").status_code == 200
    free = threading.Event()

    def pause(*_: Any) -> None:
        free.wait(0.05)

    hook = engine.model.register_forward_pre_hook(pause)
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"model": "sql", "prompt": "x", "max_tokens": 80, "ignore_eos": True, "stream": True},
        headers=TOKEN,
        timeout=30,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        busy = change(server, "unload", lora_name="sql")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "LoraInUseError")
        free.set()
        assert "data: [DONE]" in list(lines)[-2:]
    hook.remove()
    assert change(server, "unload", lora_name="sql").status_code == 200


def test_what_engines_are_not_there_for_may_be_asked_for_again(folders: LoraFolders) -> None:
    with DataParallelInferenceCoordinator() as coordinator:
        start = serve_runner(
            lambda: CoordinatedRunner(coordinator.address), ByteTokenizer(), token="secret", model_name="base", loras=folders
        )
        with start as running:
            for call, more in (("load", {"lora_path": "sql"}), ("unload", {})):
                refused = change(running, call, lora_name="sql", **more)
                assert refused.status_code == 503 and refused.headers["Retry-After"], refused.text
                assert "there is no engine that could have adapters" in refused.json()["error"]["message"]


def test_who_may_generate_changes_no_adapters_where_these_have_a_token(
    engine: DynamicInferenceEngine, root: Path, folders: LoraFolders, adapters: dict[str, LoraWeights]
) -> None:
    with pytest.raises(ValueError, match=r"loras=.* lets clients replace the model; give a token"):
        serve(engine, loras=folders)
    with pytest.raises(ValueError, match=r"host='0.0.0.0' is reachable from other machines, and loras=.*; give LoraFolders one"):
        serve(engine, host="0.0.0.0", token="secret", loras=folders)
    with pytest.raises(ValueError, match="token='' is empty"):
        LoraFolders(root=root, read=folders.read, token="")
    with pytest.raises(ValueError, match="is no folder; make it"):
        LoraFolders(root=root / "nowhere", read=folders.read)
    own = LoraFolders(root=root, read=folders.read, token="operator")
    assert "operator" not in repr(own)
    with pytest.raises(ValueError, match="the token of loras is that of the server"):
        serve(engine, token="operator", loras=own)
    with serve(engine, token="secret", loras=own) as running:
        for call, body in (("load", {"lora_name": "a", "lora_path": "sql"}), ("unload", {"lora_name": "a"})):
            assert change(running, call, **body).status_code == 401
            assert change(running, call, token="operator", **body).status_code == 200
        assert httpx.get(f"{running.url}/v1/models", headers={"Authorization": "Bearer operator"}).status_code == 401


def test_adapters_of_the_engine_are_served_without_the_routes(
    model: GPTModel, adapters: dict[str, LoraWeights], make_engine: Make, texts: dict[str | None, list[int]]
) -> None:
    engine = make_engine(model, ByteTokenizer(), lora=SLOTS)
    engine.load_lora("sql", adapters["sql"])
    with pytest.raises(ValueError, match="model_name='sql' is that of a loaded adapter"):
        serve(engine, model_name="sql")
    with serve(engine, token="secret", model_name="base") as running:
        assert tokens(running, "sql") == texts["sql"] and listed(running) == [("base", None), ("sql", "base")]
        assert change(running, "load", lora_name="x", lora_path="sql").status_code == 404
        assert "/v1/load_lora_adapter" not in httpx.get(f"{running.url}/openapi.json", headers=TOKEN).json()["paths"]


def test_an_engine_without_slots_says_so(model: GPTModel, make_engine: Make, folders: LoraFolders) -> None:
    with serve(make_engine(model, ByteTokenizer()), token="secret", loras=folders) as running:
        refused = change(running, "load", lora_name="sql", lora_path="sql")
        assert refused.status_code == 400 and "InferenceConfig(lora=LoraSlots(...))" in refused.json()["error"]["message"]
