# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` whose process is killed at a call of one of its phases, with answers that follow from weights and problem alone."""

import dataclasses
import json
import os
import signal
import traceback
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from mcore_rl import DisjointLoop, MegatronLocal
from mcore_rl._loop import _disjoint, _dpo, _handover, _loop, _update
from mcore_rl._rollouts import _stream as _rollout_stream
from mcore_tools import reinforce
from mcore_tools.rl import _critic, _run
from mcore_tools.training import RunCheckpoints
from tests.support.commands import Command, torchrun_environment

__all__ = ["PHASES", "Start", "run_starts"]

PHASES: dict[str, list[tuple[Any, str]]] = {
    "generate": [(MegatronLocal, "agenerate")],
    "exchange": [(_loop, "exchange"), (_dpo, "exchange"), (_disjoint, "delivered"), (_handover, "delivered")],
    "score": [(_update, "_score"), (_dpo, "with_ref_logprobs")],
    "train": [(_update, "train_step")],
    "refit": [(_loop, "refit"), (_dpo, "refit"), (_disjoint, "refit"), (_rollout_stream.RolloutStream, "load_weights")],
    "save_critic": [(_critic.RunCritic, "save")],
    "save": [(RunCheckpoints, "save")],
    "saved": [(_run._Run, "_agree")],
}
"""What each of them begins with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run."""

    words: Sequence[str]
    """Of ``mcore rl``."""
    phase: str = ""
    """In which it is killed; empty where it is not."""
    iteration: int = 1
    """Of this start, in which that happens."""
    rank: int = 0
    """Which is killed."""
    num_ranks: int = 1
    draws_alike: bool = True
    """The n-th answer to a prompt has a seed of its own, whenever it is drawn."""


def run_starts(starts: Sequence[Start], timeout_s: float = 280.0) -> list[list[int]]:
    """Exit codes of the ranks of each, one start after the other; what they say of errors is printed."""
    # What they import is there before the first is forked.
    with Command(_main, [json.dumps([dataclasses.asdict(start) for start in starts])]) as command:
        code = command.wait(timeout_s)
        print(command.errors)
        assert code == 0, command.errors
        codes: list[list[int]] = json.loads(command.output.splitlines()[-1])
        return codes


def _main(words: list[str]) -> int:
    torch.set_num_threads(1)
    codes = [_run_start(Start(**value)) for value in json.loads(words[0])]
    print(json.dumps(codes), flush=True)
    return 0


def _run_start(start: Start) -> list[int]:
    store, world = torchrun_environment(start.num_ranks) if start.num_ranks > 1 else (None, {})
    ranks = [_forked(start, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}) for rank in range(start.num_ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    del store
    return codes


def _forked(start: Start, environment: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ.update(environment)
        _watch(start)
        if start.draws_alike:
            _draw_alike()
        code = reinforce.main(list(start.words))
        os._exit(code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def _watch(start: Start) -> None:
    """Kill this process where the start says so."""
    begun, is_killed = [0], os.environ.get("RANK", "0") == str(start.rank)

    def before(owner: Any, name: str, *, begins: bool) -> None:
        inner = getattr(owner, name)

        def outer(*arguments: Any, **options: Any) -> Any:
            begun[0] += begins
            if not begins and begun[0] == start.iteration and is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*arguments, **options)

        setattr(owner, name, outer)

    for owner, name in ((_run, "grpo_iteration"), (_run, "dpo_iteration"), (DisjointLoop, "iterate")):
        before(owner, name, begins=True)
    for owner, name in PHASES.get(start.phase, []):
        before(owner, name, begins=False)


def _draw_alike() -> None:
    num_requests: Counter[tuple[int, ...]] = Counter()
    inner = MegatronLocal._answer

    async def answer(interface: Any, runner: Any, prompt: Any, params: Any, draw: Any) -> Any:
        # Those of an evaluation are not drawn.
        if params.temperature:
            num_requests[tuple(prompt)] += 1
            params = dataclasses.replace(params, seed=zlib.crc32(repr((list(prompt), num_requests[tuple(prompt)])).encode()))
        return await inner(interface, runner, prompt, params, draw)

    MegatronLocal._answer = answer  # type: ignore[method-assign]
