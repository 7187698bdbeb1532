# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Servers elsewhere get trained weights by their own routes: all of them, or each that did not is named."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from torch import Tensor

from mcore_ckpt import CheckpointingException
from mcore_ckpt.hf import import_hf
from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_inference.server import WeightFolders, serve
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    InferenceRequest,
    Learner,
    ServedWeights,
    ServedWeightsError,
    grpo_iteration,
    refit,
)
from mcore_rl.envs import CharacterShare
from mcore_rl.inference import BalancedInference, OpenAIInference, PeerError, PeerReplyError, RequestSeeds, SGLangInference, WeightServer

TOKENIZER = ByteTokenizer()
VOCAB = -(-TOKENIZER.vocab_size // 8) * 8
SIZES = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, num_query_groups=2, ffn_hidden_size=48, vocab_size=VOCAB)
LLAMA: dict[str, Any] = {
    "family": "llama",
    "config": {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "vocab_size": VOCAB,
    },
}
ROUTES = {
    "sglang": ("/pause_generation", "/update_weights_from_disk", "/continue_generation"),
    "vllm": ("/pause", "/collective_rpc", "/resume"),
}


def policy(seed: int = 0, groups: ProcessGroups | None = None) -> GPTModel:
    return GPTModel(SIZES, groups or ProcessGroups.single(), unpadded_vocab_size=TOKENIZER.vocab_size, seed=seed)


def weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, value.detach()) for name, value in policy(seed).named_parameters())


@dataclass
class Fake:
    """A server that checks bodies as SGLang or vLLM reads them, and has the weights of the folder it was last told."""

    kind: str
    url: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    paused: bool = False
    mode: str = ""
    """Of the pause."""
    refuse: dict[str, int] = field(default_factory=dict)
    """Calls of a route that fail, from now on."""
    hang: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)

    def answer(self, target: str, body: Any) -> tuple[int, Any]:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.calls.append((path, body if not query else {name: values[0] for name, values in query.items()}))
        if path in self.hang:
            self.released.wait(10)
            return 500, {}
        if self.refuse.get(path, 0):
            self.refuse[path] -= 1
            return (500, {"error": "broken"}) if self.kind == "vllm" else (400, {"success": False, "message": "broken"})
        if path == "/pause_generation":
            # Its own default aborts what is in flight.
            assert body in ({"mode": "retract"}, {"mode": "in_place"})
            self.paused, self.mode = True, body["mode"]
        elif path == "/pause":
            assert query["mode"][0] in ("keep", "wait") and query["clear_cache"][0] in ("true", "false")
            self.paused = True
        elif path in ("/resume", "/continue_generation"):
            self.paused = False
        elif path == "/update_weights_from_disk":
            assert body.keys() == {"model_path", "weight_version", "flush_cache"}
            assert type(body["weight_version"]) is str and type(body["flush_cache"]) is bool
            # A cache whose requests are held in their places cannot be flushed: SGLang reports no success.
            if body["flush_cache"] and self.paused and self.mode == "in_place":
                return 400, {"success": False, "message": "Cache flush failed after updating weights."}
            self.load(Path(body["model_path"]))
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        elif path == "/collective_rpc":
            assert self.paused and body.keys() == {"method", "kwargs"} and body["method"] == "reload_weights"
            self.load(Path(body["kwargs"]["weights_path"]))
            return 200, {"results": [None]}
        else:
            return 404, {"detail": "Not Found"}
        return 200, {"status": "ok"}

    def load(self, folder: Path) -> None:
        # The folder is whole before anybody hears of it.
        assert (folder / "config.json").is_file() and folder.is_absolute()
        self.weights = dict(import_hf(folder).tensors)

    def has(self, seed: int) -> bool:
        return self.weights.keys() == dict(weights(seed)).keys() and all(torch.equal(self.weights[name], w) for name, w in weights(seed))


class Server(ThreadingHTTPServer):
    # A connection that finds five others waiting is tried again a second later.
    request_queue_size = 128


@contextlib.contextmanager
def running(*kinds: str) -> Iterator[list[Fake]]:
    fakes = [Fake(kind) for kind in kinds]
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.callback(fake.released.set)

            class Handler(BaseHTTPRequestHandler):
                own = fake

                def do_POST(self) -> None:
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    status, reply = self.own.answer(self.path, body)
                    content = json.dumps(reply).encode()
                    with contextlib.suppress(OSError):
                        self.send_response(status)
                        self.send_header("Content-Length", str(len(content)))
                        self.end_headers()
                        self.wfile.write(content)

                def log_message(self, *_: Any) -> None:
                    pass

            server = stack.enter_context(Server(("127.0.0.1", 0), Handler))
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            stack.callback(server.shutdown)
            fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield fakes


def sink_of(fakes: list[Fake], folder: Path, **options: Any) -> ServedWeights:
    servers = [WeightServer(url=fake.url, kind=fake.kind, timeout_s=options.pop("timeout_s", 20.0)) for fake in fakes]  # type: ignore[arg-type]
    return ServedWeights(servers, folder, **LLAMA, **options)


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "drain"])
def test_each_kind_is_told_by_its_own_routes(tmp_path: Path, in_flight: str) -> None:
    with running("sglang", "vllm") as (sglang, vllm):
        sink = sink_of([sglang, vllm], tmp_path, in_flight=in_flight)
        for seed, version in ((1, 1), (2, 2)):
            sink.load_weights(weights(seed))
            assert sglang.has(seed) and vllm.has(seed) and not sglang.paused and not vllm.paused
            assert sink.versions == {sglang.url: version, vllm.url: version}
            # The one before is removed, and nothing half-written is left.
            assert folders(tmp_path) == [f"version-{version:08d}"]
        path = str(tmp_path / "version-00000002")
        paused = [] if in_flight == "drain" else [("/pause_generation", {"mode": "retract" if in_flight == "recompute" else "in_place"})]
        update = {"model_path": path, "weight_version": "2", "flush_cache": in_flight != "keep"}
        resumed = [("/continue_generation", {})] if paused else []
        assert sglang.calls[len(sglang.calls) // 2 :] == [*paused, ("/update_weights_from_disk", update), *resumed]
        mode = {"mode": "wait" if in_flight == "drain" else "keep", "clear_cache": "false" if in_flight == "keep" else "true"}
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        assert vllm.calls[3:] == [("/pause", mode), ("/collective_rpc", reload), ("/resume", {})]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_where_one_refuses_all_have_the_weights_before(tmp_path: Path, kind: str) -> None:
    with running(kind, kind) as fakes:
        sink = sink_of(fakes, tmp_path)
        sink.load_weights(weights(1))
        fakes[1].refuse = {ROUTES[kind][1]: 1}
        with pytest.raises(
            ServedWeightsError, match=f"version 2 of the weights: {fakes[1].url} refused .*broken.*has version 1, .*version 1"
        ):
            sink.load_weights(weights(2))
        assert all(fake.has(1) and not fake.paused for fake in fakes) and set(sink.versions.values()) == {1}
        assert folders(tmp_path) == ["version-00000001"]
        sink.load_weights(weights(3))
        # The second number is that of weights which some answers may have been drawn by.
        assert all(fake.has(3) for fake in fakes) and set(sink.versions.values()) == {3}


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_one_whose_weights_are_unknown_is_named_and_stays_paused_until_the_next_update(tmp_path: Path, kind: str) -> None:
    with running(kind, kind) as fakes:
        sink = sink_of(fakes, tmp_path)
        sink.load_weights(weights(1))
        fakes[1].refuse = {ROUTES[kind][1]: 2}
        with pytest.raises(ServedWeightsError, match=f"{fakes[1].url} has unknown weights"):
            sink.load_weights(weights(2))
        assert fakes[0].has(1) and not fakes[0].paused and fakes[1].paused
        sink.load_weights(weights(3))
        assert all(fake.has(3) and not fake.paused for fake in fakes)


def test_one_that_does_not_answer_in_time_is_named_and_not_asked_again(tmp_path: Path) -> None:
    with running("vllm", "vllm") as fakes:
        sink = sink_of(fakes, tmp_path)
        sink.load_weights(weights(1))
        fakes[1].hang = {"/collective_rpc"}
        quick = ServedWeights([WeightServer(url=fake.url, kind="vllm", timeout_s=1.0) for fake in fakes], tmp_path, **LLAMA)
        begin = time.monotonic()
        with pytest.raises(
            ServedWeightsError, match=rf"{fakes[1].url} did not answer within timeout_s=1.0\. Now .*{fakes[1].url} has unknown"
        ):
            quick.load_weights(weights(2))
        assert time.monotonic() - begin < 8
        assert [path for path, _ in fakes[1].calls].count("/collective_rpc") == 2 and fakes[1].paused
        # Nothing to go back to that this object knows: what was loaded is said, and its folder stays.
        assert fakes[0].has(2) and not fakes[0].paused and quick.versions == {fakes[0].url: 2, fakes[1].url: None}
        fakes[1].hang = set()
        quick.load_weights(weights(3))
        assert all(fake.has(3) and not fake.paused for fake in fakes) and folders(tmp_path) == ["version-00000003"]


def test_a_server_that_is_gone_changes_nothing_on_the_others(tmp_path: Path) -> None:
    with running("vllm", "vllm") as fakes:
        sink = sink_of(fakes, tmp_path)
        sink.load_weights(weights(1))
        gone = WeightServer(url="http://127.0.0.1:9", kind="vllm", timeout_s=5.0)
        wider = ServedWeights([*sink.servers, gone], tmp_path, **LLAMA)
        with pytest.raises(ServedWeightsError, match=r"127\.0\.0\.1:9 was lost"):
            wider.load_weights(weights(2))
        assert all(fake.has(1) and not fake.paused for fake in fakes) and folders(tmp_path) == ["version-00000001"]


def test_an_answer_that_does_not_say_success_is_no_success(tmp_path: Path) -> None:
    with running("sglang") as [fake]:
        for reply, error in (({"success": False, "message": "m"}, PeerError), ({}, PeerReplyError), ([], PeerReplyError)):
            fake.answer = lambda target, body, reply=reply: (200, reply)  # type: ignore[method-assign]
            server = WeightServer(url=fake.url, kind="sglang")
            with pytest.raises(PeerError, match=fake.url) as caught:
                asyncio.run(server.load(tmp_path, 1, "recompute"))
            assert type(caught.value) is error


def test_other_weights_than_the_familys_are_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    with running("sglang") as [fake]:
        sink = sink_of([fake], tmp_path)
        with pytest.raises(CheckpointingException, match="missing weights"):
            sink.load_weights(list(weights(1))[1:])
        assert not fake.calls and not folders(tmp_path) and sink.versions == {fake.url: 0}


def test_settings_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    one = WeightServer(url="http://127.0.0.1:1", kind="vllm")
    for servers in ([], [one, one]):
        with pytest.raises(ValueError, match="must name at least one server, and each once"):
            ServedWeights(servers, tmp_path, **LLAMA)
    with pytest.raises(ValueError, match="in_flight='pray' must be recompute, keep or drain"):
        ServedWeights([one], tmp_path, **LLAMA, in_flight="pray")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind='tgi' must be mcore, sglang or vllm"):
        WeightServer(url="http://127.0.0.1:1", kind="tgi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="url='here' must be http"):
        WeightServer(url="here", kind="vllm")
    with pytest.raises(ValueError, match="interfaces is empty"):
        BalancedInference([])


# -- answers of SGLang -------------------------------------------------------------------------------------------------


def test_sglang_answers_by_its_own_route() -> None:
    asked = []

    def answer(target: str, body: Any) -> tuple[int, Any]:
        asked.append((target, body))
        pairs = [[-0.5, 104, None], [-1.5, 105, None]]
        return 200, {
            "text": "hi",
            "output_ids": [104, 105],
            "meta_info": {"finish_reason": {"type": "length", "length": 2}, **about(pairs)},
        }

    def about(pairs: Any) -> dict[str, Any]:
        return {"output_token_logprobs": pairs, "weight_version": "3"}

    with running("sglang") as [fake]:
        fake.answer = answer  # type: ignore[method-assign]
        interface = SGLangInference(fake.url, tokenizer=TOKENIZER, timeout_s=20.0)
        request = InferenceRequest(prompts=[[1, 2]], generation_args=GenericGenerationArgs(max_tokens=2))
        [[response]] = asyncio.run(interface.agenerate(request))
        sampling = {"max_new_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert asked == [("/generate", {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True, "stream": False})]
        assert (response.token_ids, response.logprobs, response.finish_reason) == ([1, 2, 104, 105], [-0.5, -1.5], "length")
        assert response.weight_versions is None
        fake.answer = lambda target, body: (200, {"text": "", "meta_info": {"finish_reason": {"type": "abort"}, **about([])}})  # type: ignore[method-assign]
        with pytest.raises(PeerReplyError, match="finish_reason='abort'"):
            asyncio.run(interface.agenerate(request))
        fake.answer = lambda target, body: (200, {"text": ""})  # type: ignore[method-assign]
        with pytest.raises(PeerReplyError, match="/generate gave no completion"):
            asyncio.run(interface.agenerate(request))


# -- a server of this project ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engines(count: int, root: Path) -> Iterator[list[str]]:
    """Servers with random weights that take others from below a folder."""
    root.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        urls = []
        for number in range(count):
            context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8))
            model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5 + number).eval()
            engine = DynamicInferenceEngine(model, context, TOKENIZER, seed=number, vocab_size=TOKENIZER.vocab_size)
            taken = WeightFolders(root=root, read=lambda folder: import_hf(folder).tensors)
            urls.append(stack.enter_context(serve(engine, token="secret", weights=taken)).url)
        yield urls


def served(urls: list[str], root: Path, **options: Any) -> tuple[BalancedInference, ServedWeights]:
    keyed: dict[str, Any] = {"api_key": "secret", "timeout_s": 30.0}
    seeds = RequestSeeds(1)
    sink = ServedWeights([WeightServer(url=url, kind="mcore", **keyed) for url in urls], root, **LLAMA, **options)
    return BalancedInference(
        [OpenAIInference(url, model="mcore", tokenizer=TOKENIZER, logprobs="processed", seeds=seeds, **keyed) for url in urls]
    ), sink


def learner(groups: ProcessGroups) -> Learner:
    model = policy(groups=groups)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    return Learner(model=model, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer)


CONFIG = GRPOConfig(
    num_groups=2, group_size=16, seq_len=16, micro_batch_size=8, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
)


@pytest.mark.journey
def test_a_policy_learns_from_servers_that_take_its_weights(tmp_path: Path) -> None:
    root, own = tmp_path / "weights", learner(ProcessGroups.single())
    agent = CharacterShare(["a", "b"], "abcdefghijklmnopqrstuvwxyz")
    with engines(2, root) as urls:
        interface, sink = served(urls, root)
        refit(own.model, own.groups, sink)
        reports = [grpo_iteration(CONFIG, agent=agent, interface=interface, engine=sink, learner=own, lr=2e-2) for _ in range(8)]
        request = InferenceRequest(prompts=[[65]] * 4, generation_args=GenericGenerationArgs(max_tokens=4))
        answers = asyncio.run(interface.agenerate(request))
    # The servers answer with the policy's weights: log-probabilities are those of the trainer.
    assert all(report.train.metrics["logprob_mismatch"] < 1e-4 for report in reports)
    assert sum(r.mean_reward for r in reports[-2:]) > 1.2 * sum(r.mean_reward for r in reports[:2])
    assert {version for [answer] in answers for version in answer.weight_versions or ()} == {9}
    assert set(sink.versions.values()) == {9} and folders(root) == ["version-00000009"]


def learn_beside(urls: list[str], root: str) -> tuple[list[float], list[str]]:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    own = learner(groups)
    interface, sink = served(urls, Path(root), group=groups.world)
    refit(own.model, groups, sink)
    agent = CharacterShare(["a", "b"][groups.world.rank :], "abcdefghijklmnopqrstuvwxyz")
    reports = [grpo_iteration(CONFIG, agent=agent, interface=interface, engine=sink, learner=own, lr=2e-2) for _ in range(2)]
    refused = []
    gone = WeightServer(url="http://127.0.0.1:9", kind="mcore", timeout_s=5.0)
    for bad in (ServedWeights([gone], root, **LLAMA, group=groups.world), ServedWeights([gone], root, **OTHER, group=groups.world)):
        with pytest.raises((ServedWeightsError, CheckpointingException)) as caught:
            refit(own.model, groups, bad)
        refused.append(str(caught.value))
    return [report.train.metrics["logprob_mismatch"] for report in reports], refused


OTHER: dict[str, Any] = {**LLAMA, "config": {**LLAMA["config"], "num_layers": 2}}


@pytest.mark.journey
@pytest.mark.world(2)
def test_ranks_share_servers_and_all_learn_how_it_went(world, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    with engines(1, root) as urls:
        (mismatches, refused), other = world(learn_beside, urls=urls, root=str(root))
    assert other == (mismatches, refused) and all(mismatch < 1e-4 for mismatch in mismatches)
    assert "127.0.0.1:9 was lost" in refused[0] and "missing weights" in refused[1]
