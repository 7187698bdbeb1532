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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

zmq, msgspec = pytest.importorskip("zmq"), pytest.importorskip("msgspec")

from mcore_inference import CoordinatorError, EngineDeadError, EngineRunner, RequestError, SamplingParams  # noqa: E402
from mcore_inference.coordinator import (  # noqa: E402
    CoordinatedRunner,
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
)
from mcore_inference.coordinator._messages import (  # noqa: E402
    PROTOCOL,
    Connect,
    ConnectAck,
    EngineReply,
    Failure,
    Heartbeat,
    Partial,
    Partials,
    Refusal,
    Register,
    RegisterAck,
    Report,
    SubmitRequest,
    decode_for_client,
    decode_for_engine,
    decode_incoming,
    encode,
    number_of_request,
)
from mcore_parallel import named_shards  # noqa: E402
from mcore_parallel.data import ByteTokenizer  # noqa: E402

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, ignore_eos=True)
LONG = SamplingParams(num_tokens_to_generate=400, seed=1, ignore_eos=True)
# An engine that is silent is lost long after each test.
PATIENT = {"heartbeat_s": 0.05, "engine_timeout_s": 100.0}


@pytest.fixture
def runners(request: pytest.FixtureRequest, make_model: Make, make_engine: Make) -> Iterator[list[EngineRunner]]:
    """Two engines of equal weights, which are stuck long after each test, or where a step takes as long as a test says."""
    stall_timeout_s = getattr(request, "param", 100.0)
    with ExitStack() as stack:
        engines = [
            make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)
            for _ in range(2)
        ]
        yield [stack.enter_context(EngineRunner(engine, stall_timeout_s=stall_timeout_s)) for engine in engines]


def start(stack: ExitStack, **settings: Any) -> DataParallelInferenceCoordinator:
    return stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**{**PATIENT, **settings})))


def join(stack: ExitStack, runner: EngineRunner, to: DataParallelInferenceCoordinator, name: str = "dp-0", **options: Any) -> EngineWorker:
    security = CoordinatorSecurity(secret=to.config.security.secret)
    worker = stack.enter_context(EngineWorker(runner, to.address, name=name, heartbeat_s=0.05, security=security, **options))
    return worker


def until(holds: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


async def ten(runner: CoordinatedRunner, count: int = 1) -> None:
    streams = [await runner.submit(f"prompt {number}", TEN) for number in range(count)]
    for stream in streams:
        assert len((await stream.record()).generated_tokens) == 10


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


def raw_client(stack: ExitStack, address: str) -> Any:
    context = stack.enter_context(zmq.Context())
    client = context.socket(zmq.DEALER)
    stack.callback(client.close, linger=0)
    client.rcvtimeo = 5000
    client.connect(address)
    # A Connect, without a control secret, which it may leave out.
    client.send(b"\x93\x01" + bytes([PROTOCOL]) + b"\xa0")
    assert isinstance(decode_for_client(client.recv()), ConnectAck)
    return client


def test_a_frame_is_as_long_as_its_kind_may_be(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []

    def counted(frame: bytes) -> Any:
        longest.append(len(frame))
        return decode_incoming(frame)

    monkeypatch.setattr("mcore_inference.coordinator._coordinator.decode_incoming", counted)
    with ExitStack() as stack:
        coordinator = start(stack, max_message_bytes=2**22)
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        client = raw_client(stack, coordinator.address)
        # A heartbeat with something behind it, of two megabytes.
        client.send(b"\x92\x0f" + bytes(2**21))
        refusal = decode_for_client(client.recv())
        assert isinstance(refusal, Refusal) and "a message of 2097154 bytes is longer than its kind may be" in refusal.message
        # A request may be as long, and is read; what is longer than all may be cuts the connection, and the next one is a stranger's.
        client.send(b"\x92\x03" + bytes(2**21))
        refusal = decode_for_client(client.recv())
        assert isinstance(refusal, Refusal) and "was not understood" in refusal.message
        client.send(b"\x92\x03" + bytes(2**23))
        deadline = time.monotonic() + 10
        while not client.poll(50):
            assert time.monotonic() < deadline
            client.send(encode(Heartbeat()))
        assert isinstance(decode_for_client(client.recv()), Refusal)
        # Nothing of a stranger's long greeting is read.
        client.send(b"\x94\x01" + bytes(2**17))
        assert isinstance(decode_for_client(client.recv()), Refusal)
        asyncio.run(ten(stack.enter_context(CoordinatedRunner(coordinator.address))))
        assert 2**21 < max(longest) < 2**22 and sum(size > 2**17 for size in longest) == 1


def test_a_request_above_eight_mebibytes_is_refused_before_it_is_sent() -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            for prompt in (2 * [0, 2**20] * 2**20, "\u4e00" * 2**22):
                with pytest.raises(RequestError, match=r"it has \d{7,8} bytes and a request has at most 8388608; shorten the prompt"):
                    await client.submit(prompt, TEN)
            assert (await client.status()).waiting_requests == 0

    with ExitStack() as stack:
        asyncio.run(ask(start(stack).address))


@pytest.mark.journey
def test_requests_and_answers_that_are_too_long_fail_alone(runners: list[EngineRunner]) -> None:
    best = SamplingParams(num_tokens_to_generate=200, ignore_eos=True, return_log_probs=True, top_n_logprobs=5)

    async def ask(runner: CoordinatedRunner) -> None:
        long = await runner.submit("y", LONG)
        with pytest.raises(RequestError, match=r"it has \d+ bytes and max_message_bytes=8192; shorten the prompt"):
            await runner.submit("x" * 9000, TEN)
        with pytest.raises(RequestError, match=r"the answer has \d+ bytes and max_message_bytes=8192; ask for fewer"):
            await (await runner.submit("x", best, stream=False)).record()
        await ten(runner)
        assert len((await long.record()).generated_tokens) == 400
        assert runner.stats()["lost_engines"] == 0

    with ExitStack() as stack:
        coordinator = start(stack, max_message_bytes=8192)
        join(stack, runners[0], coordinator, max_message_bytes=8192)
        coordinator.wait_for_engines(1)
        runner = stack.enter_context(CoordinatedRunner(coordinator.address, max_message_bytes=8192))
        asyncio.run(asyncio.wait_for(ask(runner), 30))
        with pytest.raises(ValueError, match="max_message_bytes=0 must be"):
            CoordinatedRunner(coordinator.address, max_message_bytes=0)
        with pytest.raises(ValueError, match="max_message_bytes=0 must be"):
            EngineWorker(runners[1], coordinator.address, max_message_bytes=0)


@pytest.mark.parametrize(("num_items", "num_replies"), [(30, 0), (0, 30), (7, 24), (25, 6)])
def test_a_bundle_that_longer_numbers_make_too_long_is_sent_in_parts(num_items: int, num_replies: int) -> None:
    items = [Partial(request_id=2**40 + i, tokens=[i] * 60, log_probs=[], top_n_logprobs=[], text="") for i in range(num_items)]
    replies = [EngineReply(request_id=2**41 + i, record={"tokens": [i] * 60}) for i in range(num_replies)]
    limit = len(encode(Partials(items=items, replies=replies))) - 65
    # It was shorter where the engine's numbers have a byte, not nine.
    assert limit > len(encode(Partials(items=items, replies=replies))) - 8 * (num_items + num_replies)
    sent: list[list[bytes]] = []
    socket: Any = SimpleNamespace(send_multipart=lambda frames, flags: sent.append(frames))
    coordinator = DataParallelInferenceCoordinator(CoordinatorConfig(max_message_bytes=limit))
    coordinator._deliver(socket, [(b"c0", Partials(items=items, replies=replies)), (b"c1", Heartbeat())])
    assert [peer for peer, _ in sent] == [b"c0", b"c0", b"c1"] and all(len(frame) <= limit + 64 for _, frame in sent)
    parts: list[Any] = [decode_for_client(frame) for _, frame in sent[:2]]
    assert [each for part in parts for each in (*part.items, *part.replies)] == [*items, *replies]


def open_router(stack: ExitStack, receive_ms: int) -> tuple["zmq.Socket[bytes]", str]:
    """The socket of one that has taken the coordinator's place, and its address."""
    router = stack.enter_context(zmq.Context()).socket(zmq.ROUTER)
    stack.callback(router.close, linger=0)
    router.rcvtimeo = receive_ms
    return router, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.mark.journey
def test_an_engine_takes_no_longer_message_than_it_was_told(runners: list[EngineRunner]) -> None:
    """Whoever has taken the coordinator's place sends what it likes."""
    with ExitStack() as stack:
        router, address = open_router(stack, 5000)
        worker = stack.enter_context(EngineWorker(runners[0], address, heartbeat_s=0.05, max_message_bytes=2**16))
        peer, frame = router.recv_multipart()
        assert isinstance(decode_incoming(frame), Register)
        router.send_multipart([peer, b"\x92\x13" + bytes(2**17)])
        # Another connection, of the same worker.
        deadline = time.monotonic() + 10
        while (another := router.recv_multipart())[0] == peer:
            assert time.monotonic() < deadline
        message = decode_incoming(another[1])
        assert isinstance(message, Register) and message.worker == decode_incoming(frame).worker and not worker.join(0)


UNREAD = {"a kind of a later version": b"\x92\x63\x01", "no UTF-8": b"\x93\x13\x00\xa1\xff", "no message": b"\xc1"}


def test_frames_that_are_no_messages_end_neither_an_engine_nor_a_client(
    runners: list[EngineRunner], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has taken the coordinator's place, or is one of another version, sends what it likes."""
    with ExitStack() as stack:
        router, address = open_router(stack, 20_000)

        def answer(kind: type, *frames: bytes) -> Any:
            """To the next message of this kind."""
            while not isinstance(message := decode_incoming((received := router.recv_multipart())[1]), kind):
                pass
            for frame in frames:
                router.send_multipart([received[0], frame])
            return message

        with EngineWorker(runners[0], address, name="dp-0", heartbeat_s=0.05) as worker:
            answer(Register, *UNREAD.values(), encode(RegisterAck()))
            # Behind them it was taken.
            answer(Report)
            assert not worker.join(0) and caplog.text.count(f"of {address} that dp-0 cannot read") == 2

        async def ask() -> None:
            client = InferenceClient(address, timeout_s=20)
            await asyncio.gather(client.start(), asyncio.to_thread(answer, Connect, encode(ConnectAck(max_sequence_length=8))))
            for frame in UNREAD.values():
                request = client.add_request([1, 2], TEN)
                await asyncio.to_thread(answer, SubmitRequest, frame)
                with pytest.raises(CoordinatorError, match="was not understood .*; use one version"):
                    await request
            request = client.add_request([1, 2], TEN)
            number = (await asyncio.to_thread(answer, SubmitRequest)).request_id
            assert number == len(UNREAD)
            request.cancel()
            await client.stop()

        asyncio.run(asyncio.wait_for(ask(), 50))


def test_a_request_that_an_engine_cannot_read_fails_by_its_number(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        router, address = open_router(stack, 20_000)
        with EngineWorker(runners[0], address, name="dp-0", heartbeat_s=0.05):
            peer, _ = router.recv_multipart()
            numbers = (0, 127, 200, 2**15, 2**40, 2**62)
            whole = [encode(SubmitRequest(request_id=number, prompt=[1], sampling_params={}, stream=True)) for number in numbers]
            assert [number_of_request(frame) for frame in whole] == list(numbers)
            # Without a number, cut within it, of another kind, and none.
            others = (b"\x96\x03", b"\x96\x03\xce\x01", b"\x96\x03\xa1a", b"\x96\x03\xff", b"\x92\x0d\x05", b"\xc1", b"")
            assert {number_of_request(frame) for frame in others} == {None}
            # A field more than this version has; and a request that only begins.
            for frame in (encode(RegisterAck()), *others[:4], *(b"\x97" + frame[1:] + b"\x01" for frame in whole), b"\x96\x03\x09"):
                router.send_multipart([peer, frame])
            failures: list[Failure] = []
            while len(failures) <= len(numbers):
                message = decode_incoming(router.recv_multipart()[1])
                failures += [message] if isinstance(message, Failure) else []
            assert [failure.request_id for failure in failures] == [*numbers, 9]
            assert {failure.kind for failure in failures} == {"RequestError"}
            assert all(failure.message.startswith("dp-0 cannot read the request: ") for failure in failures)

    def unread(frame: bytes) -> Any:
        if number_of_request(frame) is not None:
            raise msgspec.DecodeError("it has a field of a later version")
        return decode_for_engine(frame)

    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(RequestError, match="dp-0 cannot read the request: it has a field of a later version; use one version of"):
                await client.add_request([1, 2], TEN)

    monkeypatch.setattr("mcore_inference.coordinator._worker.decode_for_engine", unread)
    with DataParallelInferenceCoordinator() as coordinator, EngineWorker(runners[0], coordinator.address, name="dp-0"):
        coordinator.wait_for_engines(1)
        asyncio.run(asyncio.wait_for(ask(coordinator.address), 30))
        assert not coordinator.num_open_requests


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
