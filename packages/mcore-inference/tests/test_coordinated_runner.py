# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of a coordinator as one runner sees them: figures, health, the end; and who may do what, over real sockets."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

zmq = pytest.importorskip("zmq")

from mcore_inference import CoordinatorError, EngineDeadError, EngineRunner, SamplingParams  # noqa: E402
from mcore_inference.coordinator import (  # noqa: E402
    CoordinatedRunner,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
)
from mcore_inference.coordinator._messages import PROTOCOL, Register, RegisterAck, decode_for_engine, encode  # noqa: E402
from mcore_parallel import named_shards  # noqa: E402
from mcore_parallel.data import ByteTokenizer  # noqa: E402
from tests.support.coordinated_engines import LONG, TEN, join, start, ten, until  # noqa: E402

Make = Callable[..., Any]


def test_requests_without_a_seed_are_all_drawn_anew_whichever_engine_and_start_of_a_coordinator(runners: list[EngineRunner]) -> None:
    open_params = SamplingParams(num_tokens_to_generate=10, ignore_eos=True)

    def drawn(count: int) -> list[tuple[int, ...]]:
        async def ask(address: str) -> list[tuple[int, ...]]:
            async with InferenceClient(address) as client:
                records = await asyncio.gather(*(client.add_request([1, 2, 3], open_params) for _ in range(count)))
                assert all(record.sampling_params == open_params for record in records)
                return [tuple(record.generated_tokens) for record in records]

        with ExitStack() as stack:
            coordinator = start(stack)
            for at, each in enumerate(runners):
                join(stack, each, coordinator, f"dp-{at}")
            coordinator.wait_for_engines(2)
            return asyncio.run(ask(coordinator.address))

    assert len({*drawn(8), *drawn(8)}) == 16


def test_the_room_is_that_of_the_smallest_cache_and_fits(make_model: Make, make_engine: Make) -> None:
    with ExitStack() as stack:
        coordinator, own = start(stack), []
        # 16 blocks of 8, where the last token takes no place, and more than the longest sequence.
        for at, num_blocks in enumerate((16, 64)):
            engine = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), num_blocks=num_blocks, max_sequence_length=192)
            own.append(stack.enter_context(EngineRunner(engine, stall_timeout_s=100.0)))
            join(stack, own[at], coordinator, f"dp-{at}")
        coordinator.wait_for_engines(2)
        runner = stack.enter_context(CoordinatedRunner(coordinator.address))
        assert [each.max_sequence_length for each in (*own, runner)] == [129, 192, 129]
        assert [each.room(100) for each in (*own, runner)] == [29, 92, 29]

        async def fill() -> None:
            # Each of both gets some.
            params = SamplingParams(num_tokens_to_generate=runner.room(100), seed=1, ignore_eos=True)
            streams = [await runner.submit([number] * 100, params) for number in range(1, 5)]
            assert [len((await stream.record()).generated_tokens) for stream in streams] == [29] * 4

        asyncio.run(fill())


@pytest.mark.journey
def test_figures_are_those_of_all_engines_and_counters_outlive_them(runners: list[EngineRunner]) -> None:
    with ExitStack() as stack:
        coordinator = start(stack)
        workers = [join(stack, each, coordinator, f"dp-{at}") for at, each in enumerate(runners)]
        coordinator.wait_for_engines(2)
        runner = stack.enter_context(CoordinatedRunner(coordinator.address))
        asyncio.run(ten(runner, 6))
        until(lambda: runner.stats()["finished_length"] == 6, "the figures of the requests came")
        stats, each = runner.stats(), [engine.stats() for engine in runners]
        own = {"engines", "draining_engines", "open_requests", "open_tokens", "lost_engines", "drained_engines", "refused_peers"}
        assert set(stats) == {*each[0], *own, "refused_messages"}
        for name in (
            "generated_tokens",
            "computed_tokens",
            "steps",
            "prefix_cache_queries",
            "total_blocks",
            "max_requests",
            "failed_steps",
        ):
            assert stats[name] == sum(one[name] for one in each), name
        assert stats["generated_tokens"] == 60 and stats["max_tokens"] == each[0]["max_tokens"] and stats["engines"] == 2
        assert stats["seconds_to_first_token"] == max(one["seconds_to_first_token"] for one in each) > 0
        engines = runner.engine_stats()
        assert {name: one["generated_tokens"] for name, one in engines.items()} == {
            f"dp-{at}": one["generated_tokens"] for at, one in enumerate(each)
        }
        workers[0].close()
        until(lambda: runner.stats()["engines"] == 1, "the coordinator lost one")
        after = runner.stats()
        assert after["generated_tokens"] == 60 and after["finished_length"] == 6 and after["lost_engines"] == 1
        assert after["total_blocks"] == each[1]["total_blocks"] and list(runner.engine_stats()) == ["dp-1"]
        # Nothing is known of gauges while nobody answers; counters keep what they were.
        coordinator.close()
        until(lambda: not runner.health().alive, "the coordinator is gone")
        gone = runner.stats()
        assert gone["generated_tokens"] == 60 and gone["engines"] == 0 and "total_blocks" not in gone and not runner.engine_stats()


def test_unfinished_requests_are_those_of_all_clients(runners: list[EngineRunner]) -> None:
    with ExitStack() as stack:
        coordinator = start(stack)
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        busy, other = (stack.enter_context(CoordinatedRunner(coordinator.address)) for _ in range(2))

        async def ask() -> None:
            streams = [await busy.submit(f"prompt {number}", LONG, stream=False) for number in range(3)]
            while other.health().unfinished_requests != 3:
                await asyncio.sleep(0.01)
            assert busy.health().unfinished_requests == 3
            for stream in streams:
                stream.abort()
            while busy.health().unfinished_requests or other.health().unfinished_requests:
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(ask(), 30))


def test_metrics_of_a_server_have_the_engines_together_and_gauges_of_each(runners: list[EngineRunner]) -> None:
    httpx = pytest.importorskip("httpx")
    from prometheus_client.parser import text_string_to_metric_families

    from mcore_inference.server import serve_runner

    with ExitStack() as stack:
        coordinator = start(stack)
        for at, each in enumerate(runners):
            join(stack, each, coordinator, f'dp-{at} "x"\n')
        coordinator.wait_for_engines(2)
        server = stack.enter_context(serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer()))
        alone = stack.enter_context(serve_runner(lambda: runners[0], ByteTokenizer()))
        body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
        for _ in range(2):
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200

        def families(url: str) -> dict[str, Any]:
            return {family.name: family for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)}

        until(lambda: families(server.url)["mcore_inference_generated_tokens"].samples[0].value == 20, "the figures of the requests came")
        many, one = families(server.url), families(alone.url)
        # What one engine's server shows, the other does too, under the same name and of the same kind.
        assert {name: many[name].type for name in one} == {name: family.type for name, family in one.items()}
        finished = {
            sample.labels["reason"]: sample.value
            for sample in many["mcore_inference_finished_requests"].samples
            if "reason" in sample.labels
        }
        assert finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
        for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
            family = many[f"mcore_inference_{name}"]
            assert family.type == "histogram" and [s.value for s in family.samples if s.name.endswith("_count")] == [2]
        for name in ("open_requests", "open_tokens", "waiting_requests", "utilization", "weight_version", "seconds_to_first_token"):
            family = many[f"mcore_inference_engine_{name}"]
            assert family.type == "gauge" and [sample.labels["engine"] for sample in family.samples] == ['dp-0 "x"\n', 'dp-1 "x"\n']
        assert "mcore_inference_engine_open_requests" not in one


@pytest.mark.slow
@pytest.mark.parametrize("stops", [True, False], ids=["a stopped process", "a hung step"])
def test_by_default_health_is_red_within_five_seconds(
    make_model: Make, make_engine: Make, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    engine = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)
    going = threading.Event()
    with ExitStack() as stack:
        coordinator = stack.enter_context(DataParallelInferenceCoordinator())
        if stops:
            script = "import sys; from tests.campaigns._serving_engine import work; work(*sys.argv[1:], '')"
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            process = subprocess.Popen([sys.executable, "-c", script, coordinator.address, "dp-0"], env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
        else:
            served = stack.enter_context(EngineRunner(engine))
            stack.enter_context(EngineWorker(served, coordinator.address))
        coordinator.wait_for_engines(1)
        runner = stack.enter_context(CoordinatedRunner(coordinator.address))
        asyncio.run(ten(runner))
        assert runner.health().alive
        begin = time.monotonic()
        if stops:
            os.kill(process.pid, signal.SIGSTOP)
        else:
            stack.callback(going.set)
            monkeypatch.setattr(engine, "step", lambda: going.wait(30) and [])
            # As one on a GPU that was warmed up.
            monkeypatch.setattr(engine.context, "device", torch.device("cuda"))
            monkeypatch.setattr(engine._executor, "is_warm", True)
            asyncio.run(asyncio.wait_for(runner.submit("hung", TEN), 10))
        until(lambda: not runner.health().alive, "health turned red", 20)
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("runners", [0.5], indirect=True)
def test_a_stuck_engine_turns_health_red_within_a_heartbeat_and_comes_back(
    runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, engine = threading.Event(), runners[0].engine
    step = engine.step

    def hang() -> Any:
        free.wait(20)
        return step()

    async def ask(runner: CoordinatedRunner) -> None:
        begin = time.monotonic()
        stream = await runner.submit("x", TEN)
        ages = []
        while runner.health().alive:
            ages.append(runner.health().last_step_age_s)
            await asyncio.sleep(0.01)
        # Half a second of the engine, a heartbeat, and half a second in which the runner asks; the rest is the machine's.
        assert 0.5 <= time.monotonic() - begin < 5 and runner.health().failure == "the coordinator has no engine"
        assert any(age is not None and 0 < age < 0.6 for age in ages)
        free.set()
        # None of its tokens was sent: it waits for an engine, and here it is the same one.
        assert len((await stream.record()).generated_tokens) == 10

    with ExitStack() as stack:
        coordinator = start(stack)
        worker = join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        runner = stack.enter_context(CoordinatedRunner(coordinator.address))
        assert runner.health().last_step_age_s is None
        monkeypatch.setattr(engine, "step", hang)
        asyncio.run(asyncio.wait_for(ask(runner), 30))
        until(lambda: runner.health().alive and worker.refusal is None, "it is back")
        assert runner.stats()["lost_engines"] == 1


def test_a_runner_that_is_told_that_no_engine_will_come_ends_and_its_server_with_it(runners: list[EngineRunner]) -> None:
    httpx = pytest.importorskip("httpx")
    from mcore_inference.server import serve_runner

    async def ask(runner: CoordinatedRunner) -> None:
        stream = await runner.submit("x", LONG)
        await anext(aiter(stream))
        runner.fail(EngineDeadError("all engines ended"))
        runner.fail(EngineDeadError("another reason"))
        with pytest.raises(EngineDeadError, match="the engines failed: all engines ended"):
            await stream.record()
        with pytest.raises(EngineDeadError, match="the engines failed: all engines ended"):
            await runner.submit("x", TEN)
        with pytest.raises(EngineDeadError, match="the engines failed: all engines ended"):
            await runner.load_weights([])

    with ExitStack() as stack:
        coordinator = start(stack)
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        made: list[CoordinatedRunner] = []

        def run() -> CoordinatedRunner:
            made.append(CoordinatedRunner(coordinator.address))
            return made[0]

        server = stack.enter_context(serve_runner(run, ByteTokenizer()))
        asyncio.run(asyncio.wait_for(ask(made[0]), 20))
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert made[0].health().failure == "EngineDeadError: all engines ended" and "all engines ended" in str(made[0].failure)
        with pytest.raises(EngineDeadError, match="all engines ended"):
            server.wait()
        made[0].close()
        # One that was closed in order did not fail.
        closed = CoordinatedRunner(coordinator.address)
        closed.close()
        closed.fail(EngineDeadError("late"))
        assert closed.failure is None


def test_what_is_open_when_a_runner_is_closed_may_be_sent_again(runners: list[EngineRunner]) -> None:
    async def ask(runner: CoordinatedRunner) -> None:
        stream = await runner.submit("x", LONG)
        await asyncio.to_thread(runner.close)
        # Not an error of the request, which no client would send again.
        with pytest.raises(EngineDeadError, match="the runner was closed"):
            await stream.record()

    with ExitStack() as stack:
        coordinator = start(stack)
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        asyncio.run(asyncio.wait_for(ask(stack.enter_context(CoordinatedRunner(coordinator.address))), 60))


def test_a_client_without_the_control_secret_generates_and_controls_nothing(runners: list[EngineRunner]) -> None:
    security = CoordinatorSecurity(secret="job", control_secret="control")
    weights = [(shard.name, shard.parameter.detach().clone()) for shard in named_shards(runners[0].engine.model)]

    async def ask(address: str, runner: CoordinatedRunner) -> None:
        await ten(runner)
        with pytest.raises(CoordinatorError, match="load_weights needs control_secret"):
            await runner.load_weights(weights)
        async with InferenceClient(address, security=CoordinatorSecurity(secret="job", control_secret="wrong")) as client:
            for call, name in ((client.pause_engines, "pause"), (client.resume_engines, "resume"), (client.stop_engines, "stop")):
                with pytest.raises(CoordinatorError, match=f"{name} needs control_secret"):
                    await call()
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10
        async with InferenceClient(address, security=security) as client:
            await client.suspend_engines()
            await client.resume_engines()
            assert await client.load_weights(weights) == 1

    with ExitStack() as stack:
        coordinator = start(stack, security=security)
        # Without the control secret, as engines are.
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        runner = stack.enter_context(CoordinatedRunner(coordinator.address, security=CoordinatorSecurity(secret="job")))
        asyncio.run(asyncio.wait_for(ask(coordinator.address, runner), 20))
    with pytest.raises(ValueError, match="control_secret='' is empty"):
        CoordinatorSecurity(control_secret="")
    with pytest.raises(ValueError, match="control_secret is a int"):
        CoordinatorSecurity(control_secret=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="secret has 4097 characters; 4096 are allowed"):
        CoordinatorSecurity(secret="x" * 4097)
    assert "control" not in repr(security).replace("control_secret", "")


def test_two_engines_of_one_name_are_told_apart_until_one_has_gone(runners: list[EngineRunner]) -> None:
    with ExitStack() as stack:
        coordinator = start(stack)
        # An engine in another process, as far as the coordinator knows.
        context = stack.enter_context(zmq.Context())
        other = context.socket(zmq.DEALER)
        other.linger = 0
        other.connect(coordinator.address)
        other.send(encode(Register(protocol=PROTOCOL, secret="", name="dp-0", state="running", max_sequence_length=512, worker="a")))
        assert isinstance(decode_for_engine(other.recv()), RegisterAck)
        second = join(stack, runners[1], coordinator)
        until(lambda: second.refusal is not None, "the second is refused")
        assert "name='dp-0' is that of an engine that is here" in str(second.refusal)
        time.sleep(0.3)
        assert second.refusal is not None and coordinator.num_engines == 1
        # Its process ends without a word, and nobody waits for its silence.
        other.close()
        until(lambda: second.refusal is None, "the name is free")
        assert coordinator.num_engines == 1


@pytest.mark.parametrize("value", [0, -1, "a", float("nan"), True, None])
def test_times_that_are_none_are_refused(value: Any, runners: list[EngineRunner]) -> None:
    with pytest.raises(ValueError, match="timeout_s=.* must be a number from 0.001 to 1000000"):
        InferenceClient("tcp://127.0.0.1:9", timeout_s=value)
    with pytest.raises(ValueError, match="timeout_s=.* must be a number from"):
        CoordinatedRunner("tcp://127.0.0.1:9", timeout_s=value)
    with pytest.raises(ValueError, match="heartbeat_s=.* must be a number from"):
        InferenceClient("tcp://127.0.0.1:9", heartbeat_s=value)
    with pytest.raises(ValueError, match="heartbeat_s=.* must be a number from"):
        EngineWorker(runners[0], "tcp://127.0.0.1:9", heartbeat_s=value)


REFUSED: list[dict[str, Any]] = [
    {"stop_token_ids": [2**30]},
    {"logit_bias": {"9999": 1}},
    {"prompt": [9999]},
    {"prompt": ""},
    {"prompt": [97] * 512, "max_tokens": 8},
    {"min_tokens": 5, "structured_outputs": {"regex": "a"}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "start: missing"}},
    # Ends when it has begun.
    {"structured_outputs": {"grammar": 'start: e\ne: e e e | e e | "a" | \n'}, "logit_bias": {"97": 1000}, "max_tokens": 200},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objct"}}}},
]


@pytest.mark.journey
def test_a_refusal_is_the_same_with_a_coordinator_and_without(runners: list[EngineRunner]) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("llguidance")
    from mcore_inference.server import serve_runner

    with ExitStack() as stack:
        coordinator = start(stack)
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        far = stack.enter_context(serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer()))
        near = stack.enter_context(serve_runner(lambda: runners[1], ByteTokenizer()))
        for fields in REFUSED:
            answers = [httpx.post(f"{each.url}/v1/completions", json={"prompt": "x", **fields}, timeout=30) for each in (near, far)]
            errors = [answer.json()["error"] for answer in answers]
            for error in errors:
                del error["request_id"]
            assert errors[0] == errors[1] and answers[0].status_code == answers[1].status_code >= 400, fields
            assert errors[0]["code"] != "RequestError" and not errors[0]["message"].startswith("request "), errors[0]


def test_a_stream_that_an_engine_refuses_has_the_status_of_its_refusal(runners: list[EngineRunner]) -> None:
    """Also where only an engine of another process can know; a client that waits for it and leaves is one that left."""
    httpx = pytest.importorskip("httpx")
    from mcore_inference.server import serve_runner

    with ExitStack() as stack:
        coordinator = start(stack)
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        server = stack.enter_context(serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer()))
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
        for path, prompt in {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        }.items():
            body = {**prompt, "stream": True, "stop_token_ids": [2**30]}
            answer = http.post(path, json=body)
            assert answer.status_code == 400 and answer.headers["content-type"] == "application/json", answer.text
            assert "stop_token_ids" in answer.json()["error"]["message"]
            good = http.post(path, json={**prompt, "stream": True, "max_tokens": 3, "ignore_eos": True})
            assert good.status_code == 200 and good.text.endswith("data: [DONE]\n\n") and '"error"' not in good.text
        asyncio.run(runners[0].pause())
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"prompt": "x", "stream": True}, timeout=0.3)
        asyncio.run(runners[0].unpause())
        until(lambda: coordinator.num_open_requests == 0, "the request of the client that left is aborted")
        until(lambda: 'mcore_inference_http_responses_total{status="499"} 1.0' in http.get("/metrics").text, "it is one that left")
