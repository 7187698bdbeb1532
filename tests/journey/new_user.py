# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a new user does with an installed application: tune a published model, be interrupted and be killed, go on, export, serve, ask.

python -I tests/journey/new_user.py FOLDER

Runs the ``mcore`` beside this interpreter in FOLDER, outside of any clone, and ends with the time of each part. It needs a POSIX system.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))

# 10 million parameters.
SIZES: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
FIELDS = ("train.seq_len=128", "train.global_batch_size=4", "optimizer.lr=1e-3", "train.steps=24", "train.checkpoint_interval=5")
SFT = ["sft", "published", "--data", "chat.jsonl", "--output", "runs/tuned", *(word for field in FIELDS for word in ("--set", field))]
MISTAKES = (
    ["sft", "no-such-model", "--data", "chat.jsonl", "--output", "runs/x"],
    ["sft", "published", "--data", "no-such.jsonl", "--output", "runs/x"],
    ["sft", "published", "--data", "chat.jsonl", "--output", "runs/x", "--set", "train.step=3"],
    ["train", "--recipe", "no_such_recipe"],
    ["train", "--recipe", "gpt_tiny", "--set", "train.steps=-1", "--set", "output=runs/x"],
    ["train", "--recipe", "gpt_tiny", "--set", "plan.tp=3", "--set", "output=runs/x"],
    ["serve", "no-such-folder"],
    ["serve", "published", "--port", "70000"],
    ["serve", "published", "--token-file", "no-such-file"],
    ["generate", "no-such-folder", "--prompt", "x"],
    ["generate", "published"],
    ["convert", "import", "no-such-folder", "out"],
    ["plan", "--model", "no-such-model", "--gpus", "8"],
    ["eval", "no-such-folder", "--text", "chat.jsonl"],
    ["nonsense"],
)
WAIT_S = 300


def mcore() -> str:
    return str(Path(sys.executable).with_name("mcore"))


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([mcore(), *arguments], stdout=file, stderr=subprocess.STDOUT)


def run(arguments: list[str], entered: str = "") -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([mcore(), *arguments], input=entered, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, f"mcore {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def wait_for(what: str, met: Callable[[], Any], program: subprocess.Popen[bytes], log: Path) -> Any:
    """What ``met`` returns once it is true, while the program lives."""
    end = time.monotonic() + WAIT_S
    while not (value := met()):
        assert program.poll() is None, f"the program ended with {program.returncode} before {what}:\n{log.read_text()}"
        assert time.monotonic() < end, f"no {what} after {WAIT_S} s:\n{log.read_text()}"
        time.sleep(0.05)
    return value


def steps() -> list[int]:
    path = Path("runs/tuned/train.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def saved(step: int) -> bool:
    return Path(f"runs/tuned/checkpoints/step_{step:08d}/manifest.json").exists()


def tune() -> None:
    """Ctrl-C, then kill -9, then to the end."""
    log = Path("sft.log")
    program = start(SFT, log)
    wait_for("a third step", lambda: len(steps()) >= 3, program, log)
    program.send_signal(signal.SIGINT)
    assert program.wait(WAIT_S) in (130, 143), log.read_text()
    stopped = steps()[-1]
    assert saved(stopped), f"nothing was saved after step {stopped}:\n{log.read_text()}"
    program = start(SFT, log)
    wait_for("a step saved on the way", lambda: saved(10) and len(steps()) >= 12, program, log)
    program.kill()
    program.wait()
    newest = max(step for step in range(10, 25) if saved(step))
    print(run(SFT).splitlines()[-1])
    # Steps behind the last save were killed with the run, and are done again: those of a run that goes on stand behind each other.
    done, last = steps(), [*range(newest + 1, 25)]
    assert sorted(set(done)) == list(range(1, 25)) and done[-len(last) :] == last, (newest, done)


def ask(url: str, question: str) -> str:
    with urllib.request.urlopen(f"{url}/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def use() -> None:
    """Generation, a chat, and a server that ends when told to: each answers as was taught."""
    prompt = "<|im_start|>user\nwhich fruit is red?<|im_end|>\n<|im_start|>assistant\n"
    small = ["--max-tokens", "8", "--temperature", "0", "--cache-gb", "0.05"]
    assert "apple" in run(["generate", "runs/tuned", "--prompt", prompt, *small])
    assert "lime" in run(["chat", "runs/tuned/hf", *small], "which fruit is green?\n/exit\n")
    log = Path("serve.log")
    program = start(["serve", "runs/tuned/hf", "--port", "0", "--cache-gb", "0.05"], log)
    address = wait_for("address", lambda: next((w for w in log.read_text().split() if w.startswith("http://")), None), program, log)
    try:
        answer = ask(address.rstrip(";"), "which fruit is yellow?")
        assert answer == "banana", answer
    finally:
        program.send_signal(signal.SIGTERM)
        assert program.wait(WAIT_S) == 0, log.read_text()


def make_mistakes() -> None:
    """Each ends at once, says what is wrong, and shows no traceback."""
    for arguments in MISTAKES:
        done = subprocess.run([mcore(), *arguments], capture_output=True, text=True, timeout=WAIT_S)
        reasons = done.stderr.strip().splitlines()
        assert done.returncode not in (0, 3), (arguments, done)
        assert reasons and "Traceback" not in done.stderr, (arguments, done.stderr)
        assert not Path("runs/x").exists(), f"mcore {' '.join(arguments)} wrote before it refused"


def main(folder: str) -> int:
    from published import write_chat, write_published

    # Threads that spin for each other are slow on a busy machine.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(folder)
    write_published(Path("published"), **SIZES)
    write_chat(Path("chat.jsonl"))
    begun = time.monotonic()
    for part in (tune, use, make_mistakes):
        before = time.monotonic()
        part()
        print(f"{part.__name__}: {time.monotonic() - before:.0f} s", flush=True)
    print(f"in all: {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
