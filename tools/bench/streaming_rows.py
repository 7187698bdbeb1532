# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What streams and their text cost the thread that steps an engine, beside a device that is only waited for.

python -m tools.bench.streaming_rows --output docs/benchmarks/streaming_rows.json

Requests decode together in an ``EngineRunner``, without and with a stream each, without and with a tokenizer of the ``tokenizers`` library
over a text. Forward and draws are replaced by a wait without Python's lock, so that a step is host work alone: ``engine_ms`` is processor
time of the engine's thread, ``wall_ms`` the time from step to step, in which the thread that reads the streams works too.

All of a row's requests end in one step: ``end_engine_ms`` is what that costs the engine's thread, ``all_engine_ms`` what all steps do, and
``loop_ms`` the longest turn of the event loop, in processor time of its thread.

python -m tools.bench.streaming_rows --model llama-1b --output docs/benchmarks/streaming_rows_gpu.json

With --model a GPU computes and draws, and what the thread spins while it waits for it is no host work. That is hidden where ``wall_ms`` is
what the GPU takes, as without streams and text.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineRunner,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.data import HuggingFaceTokenizer, train_bpe
from mcore_parallel.models import GPTModel, TransformerConfig
from tools.bench._record import record
from tools.bench.serve import MODELS

_VOCAB_SIZE = 8192
_NUM_WARM = 5
"""Steps that are not counted at either end."""


class Device:
    """Computes a step in a given time, one after the other, and draws the tokens of a text."""

    def __init__(self, step_s: float, tokens: list[int]) -> None:
        self._step_s, self._tokens = step_s, tokens
        self._free_at = 0.0
        self._place = 0

    def launch(self, num_rows: int) -> "Draws":
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
        self._place += 1
        # Each row reads elsewhere in the text.
        stride = len(self._tokens) // num_rows
        return Draws(self._free_at, [self._tokens[(row * stride + self._place) % len(self._tokens)] for row in range(num_rows)])


class Draws:
    """Of one step."""

    def __init__(self, ready_at: float, tokens: list[int]) -> None:
        self._ready_at, self._tokens = ready_at, tokens

    def wait(self) -> list[tuple[int, float, dict[int, float]]]:
        if (left_s := self._ready_at - time.perf_counter()) > 0:
            time.sleep(left_s)
        best: list[dict[int, float]] = [{}] * len(self._tokens)
        return list(zip(self._tokens, [0.0] * len(self._tokens), best, strict=True))


class TimedRunner(EngineRunner):
    """Keeps of each step the processor time of its thread, and when it ended."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.engine_ms: list[float] = []
        self.ended_at: list[float] = []
        self._spun_s = 0.0
        super().__init__(engine)

    def _step(self) -> None:
        begin, self._spun_s = time.thread_time(), 0.0
        super()._step()
        self.engine_ms.append(1e3 * (time.thread_time() - begin - self._spun_s))
        self.ended_at.append(time.perf_counter())

    @contextlib.contextmanager
    def apart_from_waits(self) -> Iterator[None]:
        """A block in which the processor time of waits for a GPU is not that of a step."""
        wait = torch.cuda.Event.synchronize

        def timed(event: torch.cuda.Event) -> None:
            begin = time.thread_time()
            wait(event)
            self._spun_s += time.thread_time() - begin

        torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]


class TimedLoop(asyncio.SelectorEventLoop):
    """Keeps the longest processor time of a turn, in which nothing else has a turn."""

    longest_ms = 0.0

    def _run_once(self) -> None:
        begin = time.thread_time()
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]
        self.longest_ms = max(self.longest_ms, 1e3 * (time.thread_time() - begin))


def build_engine(
    config: TransformerConfig, num_requests: int, num_steps: int, tokenizer: HuggingFaceTokenizer | None, **place: Any
) -> DynamicInferenceEngine:
    """An engine of random weights that has room for all requests at once."""
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), **place).eval()
    sizes = InferenceConfig(max_sequence_length=num_steps + 16, max_requests=num_requests, num_blocks=num_requests * (num_steps // 16 + 2))
    context = DynamicInferenceContext.for_model(model, sizes)
    return DynamicInferenceEngine(model, context, tokenizer, execution=ExecutionConfig(run_ahead=True))


def stand_in(engine: DynamicInferenceEngine, device_ms: float, tokens: list[int]) -> None:
    """Put a `Device` in the place of forward and draws."""
    device, executor = Device(1e-3 * device_ms, tokens), _inside(engine)

    def draw(num_rows: int) -> Any:
        return replace(nothing, results=replace(nothing.results, draws=device.launch(num_rows)))

    nothing = executor.draws.begin(torch.zeros(1, _VOCAB_SIZE), [], [])
    executor._logits = lambda host, rows: None
    executor.draws.begin = lambda logits, sampled, prompt_rows: draw(len(sampled))
    executor.draws.begin_batch = lambda logits, batch: draw(len(batch.entries))


def steps(engine: DynamicInferenceEngine, num_requests: int, num_steps: int, *, stream: bool) -> tuple[TimedRunner, float]:
    """A runner that has served requests of as many tokens, and the longest turn of their event loop, in ms, since they began."""
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=num_steps, ignore_eos=True)

    async def read(runner: EngineRunner) -> int:
        increments = await runner.submit([1, 2, 3], params, stream=stream)
        done = asyncio.get_running_loop().create_future()
        count = itertools.count()

        def take(item: Any) -> None:
            if isinstance(item, Exception):
                done.set_exception(item)
            elif next(count) >= 0 and item.record is not None:
                done.set_result(len(item.record.generated_tokens))

        increments.forward(take)
        return await done

    async def serve(runner: EngineRunner) -> None:
        await runner.pause()
        reads = [asyncio.ensure_future(read(runner)) for _ in range(num_requests)]
        # Those that were queued before.
        await asyncio.sleep(0)
        await runner.unpause()
        loop.longest_ms = 0.0
        assert await asyncio.gather(*reads) == [num_steps] * num_requests

    loop, runner = TimedLoop(), TimedRunner(engine)
    with runner, runner.apart_from_waits(), asyncio.Runner(loop_factory=lambda: loop) as turns:
        turns.run(serve(runner))
    return runner, loop.longest_ms


def _inside(engine: DynamicInferenceEngine) -> Any:
    """What drives the device, of which nothing is public."""
    return engine._executor


def _text_tokens(tokenizer: HuggingFaceTokenizer) -> list[int]:
    return tokenizer.tokenize("\n".join(_texts()))


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--answer-tokens", type=int, default=1000, help="of answers whose end is looked at")
    parser.add_argument("--device-ms", type=float, nargs="+", default=[3.0, 5.0, 10.0], help="of a step, without --model")
    parser.add_argument("--model", choices=sorted(MODELS), help="that a GPU computes, with the tokenizer's vocabulary")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_bpe(_texts(), _VOCAB_SIZE, Path(folder) / "tokenizer.json")
    tiny = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=_VOCAB_SIZE)
    config = tiny if options.model is None else replace(MODELS[options.model], vocab_size=_VOCAB_SIZE)
    place: dict[str, Any] = {} if options.model is None else {"device": "cuda", "dtype": torch.bfloat16}
    devices: list[float | None] = [None] if options.model else options.device_ms
    cases = [(options.steps, *case) for case in itertools.product(devices, (None, tokenizer), (False, True))]
    cases += [(options.answer_tokens, *case) for case in itertools.product(devices, (tokenizer,), (False, True))]
    rows: list[dict[str, Any]] = []
    for num_steps, device_ms, text, stream in cases:
        engine = build_engine(config, options.requests, num_steps, text, **place)
        if device_ms is None:
            engine.warm_up()
        else:
            stand_in(engine, device_ms, list(range(300, _VOCAB_SIZE)) if text is None else _text_tokens(text))
        work = {"model": options.model} if device_ms is None else {"device_ms": device_ms}
        runner, loop_ms = steps(engine, options.requests, num_steps, stream=stream)
        engine.close()
        engine_ms = runner.engine_ms[_NUM_WARM:-_NUM_WARM]
        wall_ms = [1e3 * (end - begin) for begin, end in itertools.pairwise(runner.ended_at)][_NUM_WARM:-_NUM_WARM]
        rows.append(
            {
                "requests": options.requests, "tokens": num_steps, **work, "streams": stream, "text": text is not None,
                "engine_ms": round(statistics.median(engine_ms), 2), "min_engine_ms": round(min(engine_ms), 2),
                "wall_ms": round(statistics.median(wall_ms), 2), "mean_wall_ms": round(statistics.mean(wall_ms), 2),
                "end_engine_ms": round(max(runner.engine_ms[-_NUM_WARM:]), 1), "all_engine_ms": round(sum(runner.engine_ms), 1),
                "loop_ms": round(loop_ms, 1),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    if options.output is not None:
        without = "" if options.model else ", without forward and draws"
        record(options.output, {"work": f"steps of decoding requests with streams{without}", "rows": rows})


if __name__ == "__main__":
    main()
