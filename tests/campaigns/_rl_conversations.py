# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations whose tool does something to its process, behind a server: each is lost alone."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mcore_parallel.data import ByteTokenizer
from mcore_rl import (
    ChatInferenceInterface,
    EnvironmentServer,
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    JudgeLimits,
    ProcessJudge,
    RemoteEnvironment,
)
from tests.support.environments import HostileTool

_HOSTILE = ("exit", "kill", "loop", "memory", "raise", "network", "other", "flood")
_ENDS_ITS_PROCESS = {"exit", "kill", "loop"}
_TOKENIZER = ByteTokenizer()


class _Calling(InferenceInterface):
    """Calls the tool once in each conversation, by these texts, and says "end" to what it gives."""

    def __init__(self, calls: Sequence[str]) -> None:
        self._calls = iter(calls)

    def encode(self, text: str) -> list[int]:
        return list(_TOKENIZER.tokenize(text))

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        text = "end" if "\ntool\n" in _TOKENIZER.detokenize(prompt) else next(self._calls)
        drawn = self.encode(text)
        return [[InferenceResponse(response=text, token_ids=[*prompt, *drawn], prompt_length=len(prompt), logprobs=[-1.0] * len(drawn))]]


def conversations(count: int) -> dict[str, Any]:
    """The tool of one conversation of 8 does something to its process; the others go on."""
    kinds = [_HOSTILE[number % len(_HOSTILE)] for number in range(count)]
    lost, wrong, seconds, begin = 0, 0, [], time.monotonic()
    judge = ProcessJudge(HostileTool, JudgeLimits(num_workers=2, time_s=1.0, memory_gb=0.5))
    try:
        with EnvironmentServer(judge, api_key="key") as server:
            remote = RemoteEnvironment(server.url, api_key="key")
            for number, hostile in enumerate(kinds):
                calls = ["good", "bad"] * 4
                calls[number % 8] = hostile
                interface = ChatInferenceInterface(_Calling(calls), _TOKENIZER.apply_chat_template)
                start = time.monotonic()
                group = asyncio.run(remote.group_rollout(interface, size=8, args=GenericGenerationArgs(max_tokens=8)))
                seconds.append(time.monotonic() - start)
                lost += 8 - len(group)
                wrong += sum(rollout.reward != 2.0 for rollout in group)
        restarts = judge.num_restarts
    finally:
        judge.close()
    ended = sum(kind in _ENDS_ITS_PROCESS for kind in kinds)
    return {
        "part": "conversations", "crashes": count, "kinds": dict(Counter(kinds)), "conversations": 8 * count, "lost": lost,
        "wrong_rewards": wrong, "processes_ended": ended, "processes_replaced": restarts,
        "median_s": round(statistics.median(seconds), 4), "most_s": round(max(seconds), 4), "seconds": round(time.monotonic() - begin, 4),
        "ok": lost == count and not wrong and ended - 2 <= restarts <= ended,
    }  # fmt: skip
