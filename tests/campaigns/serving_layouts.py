# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""`mcore serve` in each layout of two processes, on two GPUs where there are some: its start, answers, end, and what a killed process does.

A dense model, a mixture and a hybrid are trained for a moment by `mcore train`; answers at temperature 0 are to be those of one process.

python -m tests.campaigns.serving_layouts --output docs/benchmarks/serving_layouts.json
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_parallel.data import ByteTokenizer, preprocess
from mcore_parallel.guard import STALLED_EXIT_CODE
from tools.bench._record import record

__all__ = ["main"]

Figures = dict[str, Any]
_PROGRAM = (sys.executable, "-m", "mcore_tools")
_SENTENCES = (
    "A checkpoint keeps all that a server needs to know. ",
    "Two engines answer what one of them would answer. ",
    "When a process is lost its engine is started again. ",
    "Requests that had no token yet go to another engine. ",
    "A mixture has many experts and asks only two of them. ",
)
_PROMPTS = tuple(sentence[:length] for sentence in _SENTENCES for length in (8, 20))
_LAYOUTS = (("gpt_tiny", "--tp 2"), ("gpt_tiny", "--data-parallel 2"), ("moe_tiny", "--tp 2"), ("moe_tiny", "--data-parallel 2"),
            ("moe_tiny", "--data-parallel 2 --expert-parallel"), ("hybrid_tiny", "--tp 2"))  # fmt: skip


def _train(folder: Path, recipe: str, steps: int) -> Path:
    """A run whose model says the sentences of the corpus."""
    corpus = folder / "corpus"
    if not corpus.with_suffix(".idx").exists():
        (folder / "text.jsonl").write_text((json.dumps({"text": "".join(_SENTENCES)}) + "\n") * 200)
        preprocess([folder / "text.jsonl"], str(corpus), ByteTokenizer(), append_eod=True)
    values = {
        "data.prefix": corpus, "data.tokenizer": "byte", "model.vocab_size": 512, "output": folder / recipe, "train.dtype": "float32",
        "train.steps": steps, "train.eval_interval": 0, "log.html": "false", "log.tensorboard": "false",
    }  # fmt: skip
    words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run([*_PROGRAM, "train", "--recipe", recipe, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"mcore train of {recipe} ended with exit code {done.returncode}: {done.stdout[-3000:]}")
    return folder / recipe


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[str]
    url: str
    start_s: float
    log: Path

    def ask(self, prompt: str) -> str:
        """The continuation of a prompt at temperature 0."""
        body = json.dumps({"prompt": prompt, "max_tokens": 24, "temperature": 0}).encode()
        request = urllib.request.Request(f"{self.url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)["choices"][0]["text"]

    def answers(self) -> list[str]:
        """To all prompts, which are asked at once."""
        with ThreadPoolExecutor(len(_PROMPTS)) as threads:
            return list(threads.map(self.ask, _PROMPTS))

    def engines(self) -> int:
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return int(float(next(line.split()[1] for line in lines if line.startswith("mcore_inference_engines "))))

    def children(self) -> list[int]:
        """Of all threads, the oldest first: one of them starts engines again. Processes of a compiler are not among them."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        pids = sorted(int(pid) for thread in threads for pid in (thread / "children").read_text().split())
        return [pid for pid in pids if b"mcore_tools" in _command_of(pid)]

    def terminated(self) -> float:
        """Seconds from SIGTERM to the end."""
        begun = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        return time.perf_counter() - begun


def _command_of(pid: int) -> bytes:
    """Nothing for a process that has ended meanwhile."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.contextmanager
def _serving(folder: Path, words: Sequence[str], log: Path) -> Iterator[_Server]:
    begun = time.perf_counter()
    command = [*_PROGRAM, "serve", str(folder), "--port", "0", "--cache-gb", "0.05", *words]
    # Ranks are processes of this one, also on GPUs, where an engine has a process of its own beside the coordinator otherwise.
    environment = os.environ if "--data-parallel" in words else {**os.environ, "USE_COORDINATOR": "0"}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " on " not in line:
                raise RuntimeError(f"mcore serve {' '.join(words)} ended with exit code {process.wait()}: {log.read_text()[-3000:]}")
            yield _Server(process, line.split(" on ")[1].split(";")[0], time.perf_counter() - begun, log)
        finally:
            process.kill()


def _whole(folder: Path, log: Path) -> tuple[list[str], Figures]:
    """The answers of one process."""
    with _serving(folder, [], log) as server:
        texts = server.answers()
        return texts, {"start_s": round(server.start_s, 1), "exit_s": round(server.terminated(), 1)}


def _waited(holds: Callable[[], bool], what: str, timeout_s: float = 240) -> float:
    begun = time.perf_counter()
    while not holds():
        if time.perf_counter() - begun > timeout_s:
            raise TimeoutError(f"{what} within {timeout_s:g} s")
        time.sleep(0.05)
    return time.perf_counter() - begun


def _layout(folder: Path, words: str, wanted: Sequence[str], log: Path) -> Figures:
    """One layout from its start to its end, with a process that is killed meanwhile."""
    problems: list[str] = []

    def check(good: bool, problem: str) -> None:
        if not good:
            problems.append(problem)

    with _serving(folder, words.split(), log) as server:
        figures: Figures = {"start_s": round(server.start_s, 1)}
        texts = server.answers()
        figures["equal_answers"] = sum(text == other for text, other in zip(texts, wanted, strict=True))
        check(texts == wanted, f"{[pair for pair in zip(texts, wanted, strict=True) if pair[0] != pair[1]][:2]} differ")
        children = server.children()
        if "--data-parallel" in words:
            check(server.engines() == 2, f"{server.engines()} engines")
            os.kill(children[-1], signal.SIGKILL)
            killed = time.perf_counter()
            _waited(lambda: "is started again" in log.read_text(), "the killed engine was not named")
            # Engines that share experts come back together; others answer meanwhile.
            check(server.ask(_PROMPTS[0]) == wanted[0], "another answer after the kill")
            _waited(lambda: server.engines() == 2, "the killed engine did not come back")
            figures["back_s"] = round(time.perf_counter() - killed, 1)
            check(server.answers() == wanted, "other answers of engines that came back")
            children += server.children()
        figures["exit_s"] = round(server.terminated(), 1)
        check(server.process.returncode == 0, f"exit code {server.process.returncode} of SIGTERM: {log.read_text()[-1000:]}")
        left = [pid for pid in children if Path(f"/proc/{pid}").exists()]
        check(not left, f"processes {left} are left: {[_command_of(pid) for pid in left]}")
    if "--data-parallel" not in words:
        # A rank that is lost ends all of them.
        with _serving(folder, words.split(), log) as server:
            [child] = server.children()
            os.kill(child, signal.SIGKILL)
            figures["exit_after_kill_s"] = round(_waited(lambda: server.process.poll() is not None, "the first rank did not end"), 1)
            check(server.process.returncode == STALLED_EXIT_CODE, f"exit code {server.process.returncode} of a lost rank")
    return {**figures, "problems": problems}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve in each layout, write the figures, return 1 where one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of the training")
    models = list(dict.fromkeys(recipe for recipe, _ in _LAYOUTS))
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="recipes")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() == 1:
        parser.error("layouts of two processes need two GPUs, or none; hide the one by CUDA_VISIBLE_DEVICES=")
    rows: list[Figures] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts: dict[str, list[str]] = {}
        for recipe, words in [layout for layout in _LAYOUTS if layout[0] in options.models]:
            log = folder / "log"
            try:
                if recipe not in texts:
                    _train(folder, recipe, options.steps)
                    texts[recipe], figures = _whole(folder / recipe, log)
                    rows.append({"model": recipe, "layout": "one process", "answer": texts[recipe][0], **figures, "problems": []})
                    print(json.dumps(rows[-1]), flush=True)
                figures = _layout(folder / recipe, words, texts[recipe], log)
            except (RuntimeError, OSError, AssertionError, ValueError, subprocess.TimeoutExpired) as error:
                figures = {"problems": [f"{type(error).__name__}: {error}; {log.read_text()[-2000:] if log.exists() else ''}"]}
            rows.append({"model": recipe, "layout": words, **figures})
            print(json.dumps(rows[-1]), flush=True)
    if options.output:
        record(options.output, {"work": f"mcore serve, {len(_PROMPTS)} prompts at temperature 0, float32", "rows": rows})
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
