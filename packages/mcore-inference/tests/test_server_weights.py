# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A running server takes weights from a folder, when who asks may, and only from below its root."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from mcore_inference import EngineRunner
from mcore_inference.coordinator import CoordinatedRunner, DataParallelInferenceCoordinator, EngineWorker
from mcore_inference.server import InferenceServer, WeightFolders, serve, serve_runner
from mcore_parallel.data import ByteTokenizer

Make = Callable[..., Any]
TOKEN = {"Authorization": "Bearer secret"}


def read(folder: Path) -> Iterable[tuple[str, Tensor]]:
    """The weights of this test's folders are a seed."""
    seed = int((folder / "seed").read_text())

    def weights() -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in SHAPES.items():
            yield name, torch.randn(tensor, generator=generator) * 0.3

    return weights()


SHAPES: dict[str, torch.Size] = {}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed in (3, 4):
        (tmp_path / "shared" / f"version-{seed}").mkdir(parents=True)
        (tmp_path / "shared" / f"version-{seed}" / "seed").write_text(str(seed))
    return tmp_path / "shared"


@pytest.fixture
def server(root: Path, make_model: Make, make_engine: Make) -> Iterator[InferenceServer]:
    model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
    SHAPES.clear()
    SHAPES.update({name: parameter.shape for name, parameter in model.named_parameters()})
    engine = make_engine(model, ByteTokenizer(), max_sequence_length=48)
    with serve(engine, token="secret", weights=WeightFolders(root=root, read=read)) as running:
        yield running


def update(server: InferenceServer, path: Path | str, version: int = 3, **more: Any) -> httpx.Response:
    body = {"model_path": str(path), "weight_version": version, **more}
    return httpx.post(f"{server.url}/update_weights_from_disk", json=body, headers=TOKEN, timeout=30)


def answer(server: InferenceServer) -> dict[str, Any]:
    body = {"prompt": [65, 66, 67], "max_tokens": 6, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=TOKEN, timeout=30).json()["choices"][0]


def test_a_folder_replaces_the_weights_and_tokens_say_which_drew_them(server: InferenceServer, root: Path) -> None:
    before = answer(server)
    assert set(before["weight_versions"]) == {0} and len(before["weight_versions"]) == len(before["token_ids"])
    response = update(server, root / "version-3", 7)
    assert response.status_code == 200 and response.json()["success"] is True and response.json()["weight_version"] == 7
    after = answer(server)
    for body, place in (({"prompt": [65, 66]}, "completions"), ({"messages": [{"role": "user", "content": "A"}]}, "chat/completions")):
        body |= {"max_tokens": 6, "return_token_ids": True}
        whole = httpx.post(f"{server.url}/v1/{place}", json=body, headers=TOKEN, timeout=30).json()["choices"][0]
        assert whole["weight_versions"] == [7] * len(whole["token_ids"]) and whole["prompt_token_ids"]
        text = httpx.post(f"{server.url}/v1/{place}", json={**body, "stream": True}, headers=TOKEN, timeout=30).text
        chunks = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
        *others, last = [chunk for chunk in chunks if "token_ids" in chunk]
        assert last["weight_versions"] == [7] * sum(len(chunk["token_ids"]) for chunk in (*others, last))
        assert not any("weight_versions" in chunk for chunk in others)
    assert set(after["weight_versions"]) == {7} and after["logprobs"]["token_logprobs"] != before["logprobs"]["token_logprobs"]
    update(server, root / "version-4", 8, in_flight="drain")
    other = answer(server)
    assert other["logprobs"]["token_logprobs"] != after["logprobs"]["token_logprobs"]
    # Below the root, wherever the server was started.
    assert update(server, "version-3", 9).status_code == 200
    assert answer(server)["logprobs"] == after["logprobs"]


@pytest.mark.journey
def test_who_may_not_and_what_is_not_there_change_nothing(server: InferenceServer, root: Path, tmp_path: Path) -> None:
    before = answer(server)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "seed").write_text("5")
    (root / "link").symlink_to(outside)
    (root / "empty").mkdir()
    (root / "file").write_text("")
    (root / "circle").symlink_to("circle")
    url = f"{server.url}/update_weights_from_disk"
    assert httpx.post(url, json={"model_path": str(root / "version-3"), "weight_version": 1}).status_code == 401
    inside = (root / "link", root / ".." / "outside", root, root / "file", root / "nowhere", root / "circle")
    for path in (*inside, outside, "../outside", "link", ".", "a\0b"):
        refused = update(server, path)
        assert refused.status_code == 400 and "model_path" in refused.json()["error"]["message"], path
    empty = update(server, root / "empty")
    assert empty.status_code == 400 and "holds no weights for this model" in empty.json()["error"]["message"]
    assert update(server, root / "version-3", -1).status_code == 422
    assert update(server, root / "version-3", in_flight="pray").status_code == 422
    assert answer(server) == before


def test_weights_of_another_model_are_refused_by_name(server: InferenceServer, root: Path) -> None:
    before = answer(server)
    SHAPES["stranger"] = torch.Size([2])
    refused = update(server, root / "version-3")
    assert refused.status_code == 400 and "stranger" in refused.json()["error"]["message"]
    del SHAPES["stranger"]
    assert update(server, root / "version-4").status_code == 200
    assert answer(server)["logprobs"] != before["logprobs"]


def test_without_the_setting_there_is_no_such_route(make_model: Make, make_engine: Make, root: Path) -> None:
    engine = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=48)
    with pytest.raises(ValueError, match="lets clients replace the model; give a token"):
        serve(engine, weights=WeightFolders(root=root, read=read))
    with pytest.raises(ValueError, match="is no folder; make it"):
        WeightFolders(root=root / "nowhere", read=read)
    with serve(engine, token="secret") as running:
        assert update(running, root / "version-3").status_code == 404
        document = httpx.get(f"{running.url}/openapi.json", headers=TOKEN).json()
        assert "/update_weights_from_disk" not in document["paths"]


def test_a_token_of_its_own_replaces_weights_and_no_other_does(make_model: Make, make_engine: Make, root: Path) -> None:
    model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
    SHAPES.clear()
    SHAPES.update({name: parameter.shape for name, parameter in model.named_parameters()})
    with pytest.raises(ValueError, match="token='' is empty"):
        WeightFolders(root=root, read=read, token="")
    engine = make_engine(model, ByteTokenizer(), max_sequence_length=48)
    with pytest.raises(ValueError, match=r"host='0.0.0.0' is reachable from other machines, and weights=.* has no token of its own"):
        serve(engine, host="0.0.0.0", token="secret", weights=WeightFolders(root=root, read=read))
    with pytest.raises(ValueError, match="the token of weights is that of the server"):
        serve(engine, token="secret", weights=WeightFolders(root=root, read=read, token="secret"))
    folders = WeightFolders(root=root, read=read, token="trainer")
    assert "trainer" not in repr(folders)
    with serve(engine, token="secret", weights=folders) as running:
        before = answer(running)
        assert update(running, root / "version-3").status_code == 401 and answer(running) == before
        body = {"model_path": str(root / "version-3"), "weight_version": 3}
        trainer = {"Authorization": "Bearer trainer"}
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"}, headers=trainer).status_code == 401
        assert httpx.post(f"{running.url}/update_weights_from_disk", json=body, headers=trainer, timeout=30).status_code == 200
        assert set(answer(running)["weight_versions"]) == {3}


class Bare:
    """A runner that takes no weights."""

    failure = None
    max_sequence_length = 8
    closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_runner_that_takes_no_weights_is_refused(root: Path) -> None:
    runner: Any = Bare()
    with pytest.raises(ValueError, match="a Bare has no load_weights"):
        serve_runner(lambda: runner, ByteTokenizer(), token="secret", weights=WeightFolders(root=root, read=read))
    assert runner.closed.is_set()
    assert hasattr(CoordinatedRunner, "load_weights")


def test_an_engine_that_started_again_answers_503_until_a_folder_is_loaded_again(make_model: Make, make_engine: Make, root: Path) -> None:
    models = [make_model(vocab_size=272, dtype=torch.float32, layers=1) for _ in range(2)]
    SHAPES.update({name: parameter.shape for name, parameter in models[0].named_parameters()})
    folders = WeightFolders(root=root, read=read)
    with DataParallelInferenceCoordinator() as coordinator, ExitStack() as stack:
        first, second = (stack.enter_context(EngineRunner(make_engine(model, ByteTokenizer(), max_sequence_length=48))) for model in models)
        over = serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer(), token="secret", weights=folders)
        server = stack.enter_context(over)
        with EngineWorker(first, coordinator.address, name="dp-0"):
            coordinator.wait_for_engines(1)
            assert update(server, root / "version-3", 3).status_code == 200
            loaded = answer(server)
        with EngineWorker(second, coordinator.address, name="dp-0"):
            coordinator.wait_for_engines(1)
            # The server asks the coordinator for its engines twice a second.
            while httpx.get(f"{server.url}/health", timeout=30).status_code != 200:
                time.sleep(0.05)
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=TOKEN, timeout=30)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "StaleWeightsError"
            assert "version 3" in refused.json()["error"]["message"] and "load them again" in refused.json()["error"]["message"]
            assert update(server, root / "version-3", 3).status_code == 200
            assert answer(server) == loaded and set(loaded["weight_versions"]) == {3}
