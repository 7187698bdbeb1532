# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs of ``mcore rl`` that are killed in one of their phases and started again until they end."""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt import CheckpointManager
from mcore_ckpt.manifest import read_manifest
from mcore_rl import MegatronLocal
from mcore_rl._loop import _loop as loop_module
from mcore_rl.envs import Countdown
from mcore_tools import reinforce
from mcore_tools.rl import _run as run_module
from mcore_tools.training import RunCheckpoints
from tests.support.countdown import PACE, QUIET, SIZES, countdown_words

__all__ = ["PHASES", "Resumed", "mismatches", "resume"]

_STEPS, _GROUPS, _GROUP_SIZE = 4, 2, 4
_FIELDS = (*SIZES, *PACE, *QUIET, f"train.steps={_STEPS}", "rl.imitation_steps=2", "train.eval_interval=2", "train.checkpoint_interval=1")
_SHORT = ("rl.generation_args.max_tokens=6", "rl.kl_beta=0.01")
_MOST_CALLS = {"imitate": 1, "pose": 8, "generate": 20, "judge": 20, "update": 3, "refit": 3, "evaluate": 2, "save": 3, "written": 3}
"""Calls at which a run is killed, at most; of four iterations, the last of which may be all that is left."""
PHASES = tuple(_MOST_CALLS)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What came of a run that was killed."""

    phase: str
    kills: int
    problem: str = ""


def resume(folder: Path, phase: str, seed: int, *, kills: int = 2) -> Resumed:
    """Kill a run ``kills`` times in a phase, at a random call of it, and then let it end; what is wrong with what it leaves."""
    rng, killed = random.Random(f"{phase} {seed}"), 0
    for _ in range(kills):
        killed += _in_child(folder, phase, rng.randint(1, _MOST_CALLS[phase]), rng.uniform(0, 0.02)) == -signal.SIGKILL
    if code := _in_child(folder, "", 0, 0.0):
        return Resumed(phase=phase, kills=killed, problem=f"the last start ended with {code}: {(folder / 'log').read_text()[-300:]}")
    return Resumed(phase=phase, kills=killed, problem=_wrong(folder))


def mismatches(folder: Path, steps: int) -> list[float]:
    """Mean |log-probability difference| of engine and trainer in each iteration of a run whose learning rate is 0.

    Raises:
        RuntimeError: the run failed.
    """
    still = ("optimizer.lr=0", "optimizer.min_lr=0", "train.warmup_steps=0", f"train.steps={steps}", "train.eval_interval=0")
    if code := _in_child(folder, "", 0, 0.0, (*still, "train.checkpoint_interval=0")):
        raise RuntimeError(f"the run ended with {code}: {(folder / 'log').read_text()[-300:]}")
    return [json.loads(line)["logprob_mismatch"] for line in (folder / "run" / "train.jsonl").read_text().splitlines()]


def _in_child(folder: Path, phase: str, call: int, delay_s: float, changes: tuple[str, ...] = ()) -> int:
    """The exit code of a start that is killed at one of its calls of a phase."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        _watch(folder, _Killer(phase, call, delay_s))
        code = reinforce.main(countdown_words(*_FIELDS, *_SHORT, f"output={folder / 'run'}", *changes))
        sys.stdout.flush()
        os._exit(code)
    finally:
        os._exit(99)


class _Killer:
    """Ends the process at one of the calls of a phase."""

    def __init__(self, phase: str, call: int, delay_s: float) -> None:
        self._phase, self._left, self._delay_s = phase, call, delay_s

    def __call__(self, phase: str) -> None:
        if phase != self._phase:
            return
        self._left -= 1
        if self._left == 0:
            # In the midst of what is called, or of what follows.
            threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _watch(folder: Path, passes: _Killer) -> None:
    """Say of each phase when it begins, and keep what each step was trained on."""
    step = [0]

    def before(owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def outer(*arguments: Any, **options: Any) -> Any:
            passes(phase)
            return inner(*arguments, **options)

        setattr(owner, name, outer)

    before(run_module, "imitate", "imitate")
    before(Countdown, "problem", "pose")
    before(MegatronLocal, "agenerate", "generate")
    before(Countdown, "get_reward", "judge")
    before(loop_module, "refit", "refit")
    before(run_module._Run, "evaluate", "evaluate")
    before(RunCheckpoints, "save", "save")
    update: Callable[..., Any] = loop_module.update
    iteration: Callable[..., Any] = run_module._Run._iteration

    def noted_update(config: Any, collected: Any, *arguments: Any, **options: Any) -> Any:
        passes("update")
        done = update(config, collected, *arguments, **options)
        answers = [[rollout.problem_id, list(rollout.trajectory)] for _, rollout in sorted(collected.rollouts.items())]
        with (folder / "trained.jsonl").open("a") as file:
            file.write(json.dumps({"step": step[0], "answers": answers}) + "\n")
        return done

    def noted_iteration(run: Any, grpo: Any, number: int, lr: float) -> Any:
        step[0] = number
        report = iteration(run, grpo, number, lr)
        passes("written")
        return report

    loop_module.update = noted_update  # type: ignore[assignment]
    run_module._Run._iteration = noted_iteration  # type: ignore[method-assign]


def _wrong(folder: Path) -> str:
    """What a run that was killed and ended has lost, doubled or drawn again."""
    steps = [json.loads(line)["step"] for line in (folder / "run" / "train.jsonl").read_text().splitlines()]
    if steps != list(range(1, _STEPS + 1)):
        return f"train.jsonl has steps {steps}"
    manager = CheckpointManager(folder / "run" / "checkpoints")
    extra = read_manifest(manager.folder(_STEPS)).extra
    if manager.latest() != _STEPS or sum(extra["rl"]["problems"]["num_taken"]) != _STEPS * _GROUPS:
        return f"the newest checkpoint is {manager.latest()} at {extra['rl']}"
    trained: dict[int, list[list[Any]]] = {}
    for line in (folder / "trained.jsonl").read_text().splitlines():
        value = json.loads(line)
        trained.setdefault(value["step"], []).append(value["answers"])
    for step, attempts in trained.items():
        # What counts is the last attempt; the others went with their process.
        ids = sorted(problem_id for problem_id, _ in attempts[-1])
        wanted = sorted(f"countdown/0/{number}" for number in range(_GROUPS * (step - 1), _GROUPS * step) for _ in range(_GROUP_SIZE))
        if ids != wanted:
            return f"step {step} was trained on {ids}"
        if any(one == other for number, one in enumerate(attempts) for other in attempts[:number]):
            return f"step {step} drew the same answers again"
    return "" if sorted(trained) == steps else f"trained on steps {sorted(trained)}"
