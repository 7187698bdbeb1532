# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rewards by a model: one with a value head, or one that is asked for its verdict."""

import asyncio
import contextlib
import json
import re
import string
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from mcore_parallel.models import ValueHead
from mcore_parallel.training import Batch, score
from mcore_rl._by_loop import of_this_loop
from mcore_rl._http import HttpPeer, PeerError, PeerReplyError
from mcore_rl._lost import LostError
from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceRequest
from mcore_rl.agent._conversation import Conversation
from mcore_rl.agent._held_elsewhere import HeldElsewhere
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._numbered import NumberedAgent, ignore_turn, within_own_limit
from mcore_rl.agent._posed_here import PosedHere
from mcore_rl.inference import InferenceInterface

VERDICT_PROMPT = """Judge how good an answer is.

Task:
{prompt}

Reference answer, where there is one:
{golden}

Answer to judge:
{response}

Say briefly what is right and wrong about it. Then end with a number from 0 to 1, like this: <score>0.5</score>"""
"""What `LLMJudge` asks, unless it is told otherwise."""
_SCORE = re.compile(r"<score>\s*([-+]?\d{1,20}(?:\.\d{1,20})?)\s*</score>\W*\Z")
_FIELDS = {"prompt", "golden", "response"}
_WAITS_S = (0.1, 1.0, 5.0)
"""Before the second try and the following ones."""
_TRANSIENT = (408, 429, 500, 502, 503, 504)


@experimental_api
class ResponseScorer(Protocol):
    """What judges answers."""

    async def score(self, response: str, problem: Problem) -> float:
        """How good an answer is; what it raises loses the answer.

        Args:
            response: the answer; of a conversation all that was said in it, as JSON: a list of messages, in which those of the policy have
                the role ``assistant``.
            problem: that it is about.
        """
        ...


@experimental_api
class ModelJudge(HeldElsewhere, PosedHere):
    """The problems of an environment, with rewards by a model in place of its own. Where that holds conversations, it replies.

    Args:
        environment: poses the problems. Its own ``judge_timeout_s`` limits each reply.
        scorer: judges: a `RewardModel`, an `LLMJudge`, or anything with ``async score(response, problem)``.
        judge_timeout_s: deadline of a reward, the wait for a place and all tries included. An answer without a reward by then is lost
            alone, as one whose judge raises (``num_dropped``).

    Raises:
        ValueError: a limit that is not positive.

    Example:
        >>> ModelJudge(Capitals(), LLMJudge(ChatEndpoint("http://127.0.0.1:8000", model="judge"))).env_id
        'capitals'
    """

    def __init__(self, environment: NumberedAgent, scorer: ResponseScorer, *, judge_timeout_s: float = 600.0) -> None:
        super().__init__(lambda: environment)
        if not judge_timeout_s > 0:
            raise ValueError(f"judge_timeout_s={judge_timeout_s} of environment {self.env_id!r} must be positive")
        self.scorer, self.judge_timeout_s = scorer, judge_timeout_s

    async def _judged(self, response: str, problem: Problem) -> float:
        return await self.scorer.score(response, problem)

    async def _opening(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        return await within_own_limit(self._own, self._own._opening(problem))

    async def _reply(
        self, conversation: Conversation, answer: str, on_turn: Callable[[], None] = ignore_turn
    ) -> Sequence[Mapping[str, Any]]:
        return await within_own_limit(self._own, self._own._reply(conversation, answer, on_turn))

    async def _outcome(self, conversation: Conversation, on_turn: Callable[[], None] = ignore_turn) -> float:
        self._forget(conversation)
        return await self.scorer.score(json.dumps(conversation.messages, ensure_ascii=False), conversation.problem)

    def _forget(self, conversation: Conversation) -> None:
        self._own._forget(conversation)


@experimental_api
class UnreadableVerdictError(LostError):
    """A judge said nothing that is a verdict; the message has what it said."""


@experimental_api
class ChatEndpoint:
    """``/v1/chat/completions`` of an OpenAI-compatible server: a text in, a text out.

    Args:
        url: of the server without path, as ``http://127.0.0.1:8000``.
        model: name that the server gives the model.
        api_key: sent as a bearer token.
        timeout_s: seconds from the connection to the last byte of an answer.

    Raises:
        ValueError: a setting out of its range; names it.
    """

    def __init__(self, url: str, *, model: str, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self._peer, self.url, self.model = HttpPeer(url, api_key=api_key, timeout_s=timeout_s), url, model

    async def answer(self, text: str, args: GenericGenerationArgs) -> str:
        """To one message of the user.

        Raises:
            PeerError: the server gave no answer, or one that is none; names it.
        """
        chosen = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "max_tokens": args.max_tokens}
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        body |= {name: value for name, value in chosen.items() if value is not None}
        content = await self._peer.post("/v1/chat/completions", json.dumps(body).encode())
        try:
            answer = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise PeerReplyError(f"{self.url} gave no chat completion ({error!r}): {content[:200]!r}") from error
        if not isinstance(answer, str):
            raise PeerReplyError(f"{self.url} gave a message whose content is {answer!r:.200}; it must be a text")
        return answer


@experimental_api
def read_score(verdict: str) -> float | None:
    """The number from 0 to 1 of the ``<score>NUMBER</score>`` with which a verdict ends; None where it ends otherwise.

    A score before the end is one that the judge has quoted, as from an answer that praises itself, and has not followed by its own.

    Example:
        >>> read_score("Right, but long. <score>0.8</score>")
        0.8
    """
    match = _SCORE.search(verdict)
    value = float(match[1]) if match else -1.0
    return value if 0 <= value <= 1 else None


@experimental_api
@dataclass
class VerdictCounts:
    """What an `LLMJudge` has done so far."""

    requests: int = 0
    """For verdicts, the repeated ones among them."""
    failed: int = 0
    """Answers without a reward because their last request failed."""
    unreadable: int = 0
    """Answers whose verdict could not be read."""


@experimental_api
class LLMJudge:
    """Asks a language model how good an answer is, and reads the number in what it says.

    A request whose failure passes is repeated. So is one whose verdict cannot be read, unless it is greedy and would be the same again;
    when the tries are used up the answer has the reward ``unreadable``, or is lost with an `UnreadableVerdictError`. ``counts`` has both.
    What the policy wrote is part of the question: a judge can be talked into a verdict, and its rewards want looking at.

    Args:
        model: answers: a `ChatEndpoint`, or any interface; a `ChatInferenceInterface` writes the question as a message of the user.
        prompt: the question, with ``{prompt}``, ``{golden}`` and ``{response}``, the last of which must be there.
        read: the reward in a verdict; None where it has none.
        args: how verdicts are drawn.
        unreadable: reward where no verdict could be read; None loses the answer.
        num_tries: requests for a verdict, at most.
        max_concurrency: answers that are judged at a time, from one event loop.

    Raises:
        ValueError: a question without the answer or with an unknown field, or a number out of its range.
    """

    def __init__(
        self,
        model: ChatEndpoint | InferenceInterface,
        *,
        prompt: str = VERDICT_PROMPT,
        read: Callable[[str], float | None] = read_score,
        args: GenericGenerationArgs | None = None,
        unreadable: float | None = None,
        num_tries: int = 3,
        max_concurrency: int = 32,
    ) -> None:
        named = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
        if "response" not in named or not named <= _FIELDS:
            raise ValueError(f"prompt has the fields {sorted(named)}; it must have response, and may have golden and prompt")
        for name, value in (("num_tries", num_tries), ("max_concurrency", max_concurrency)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.model, self.prompt, self.unreadable = model, prompt, unreadable
        self.num_tries, self.max_concurrency = num_tries, max_concurrency
        self.args = args or GenericGenerationArgs(temperature=0.0, max_tokens=512)
        self.counts = VerdictCounts()
        self._read = read
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def score(self, response: str, problem: Problem) -> float:
        """The reward of an answer.

        Raises:
            UnreadableVerdictError: no verdict could be read, and ``unreadable`` is None.
            LostError, PeerError, TimeoutError: the last request failed.
        """
        text = self.prompt.format(prompt=problem.prompt, golden=problem.golden, response=response)
        async with of_this_loop(self._gates, lambda: asyncio.Semaphore(self.max_concurrency)):
            for number in range(1, self.num_tries + 1):
                is_last = number == self.num_tries
                try:
                    verdict = await self._ask(text)
                except (LostError, PeerError, TimeoutError) as error:
                    if is_last or not _passes(error):
                        self.counts.failed += 1
                        raise
                    await asyncio.sleep(_WAITS_S[min(number, len(_WAITS_S)) - 1])
                    continue
                if (value := self._read(verdict)) is not None:
                    return value
                if is_last or self.args.temperature == 0:
                    break
        self.counts.unreadable += 1
        if self.unreadable is None:
            raise UnreadableVerdictError(f"the judge of problem {problem.problem_id!r} gave no verdict: {verdict[-200:]!r}")
        return self.unreadable

    async def _ask(self, text: str) -> str:
        self.counts.requests += 1
        if isinstance(self.model, ChatEndpoint):
            return await self.model.answer(text, self.args)
        request = InferenceRequest(prompts=[self.model.encode(text)], generation_args=self.args)
        [[answer]] = await self.model.agenerate(request)
        return answer.response


def _passes(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, LostError):
        return error.is_transient
    if isinstance(error, TimeoutError) or not isinstance(error, PeerError):
        return True
    return error.status in _TRANSIENT or (error.status is None and not isinstance(error, PeerReplyError))


@dataclass
class _Waiting:
    """Answers that wait for a forward pass, in one event loop."""

    entries: list[tuple[list[int], "asyncio.Future[float]"]] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None


@experimental_api
class RewardModel:
    """Rewards are the values of a model with a value head, at the last token of problem and answer.

    Answers that wait are scored together, in a thread, one batch at a time, whatever event loops they come from.

    Args:
        model: whole on this rank, with the weights of a reward model.
        head: of ``add_value_head``.
        encode: token ids of a problem and an answer, by the model's tokenizer and template.
        max_tokens: an answer that is longer with its problem is lost.
        max_batch_size: answers a forward pass.

    Raises:
        ValueError: a model that is divided among ranks, which are not asked at once; a number out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        head: ValueHead,
        encode: Callable[[Problem, str], Sequence[int]],
        *,
        max_tokens: int,
        max_batch_size: int = 16,
    ) -> None:
        groups = head.groups
        if groups.tp.size * groups.pp.size * groups.cp.size > 1:
            raise ValueError(
                f"the model is divided by {groups.plan}, and each rank judges for itself; build it with ProcessGroups.single()"
            )
        for name, value in (("max_tokens", max_tokens), ("max_batch_size", max_batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.model, self.head, self.max_tokens, self.max_batch_size = model, head, max_tokens, max_batch_size
        self._encode = encode
        self._waiting: dict[asyncio.AbstractEventLoop, _Waiting] = {}
        self._lock = threading.Lock()

    async def score(self, response: str, problem: Problem) -> float:
        """The value of an answer.

        Raises:
            LostError: it has no token, or more than ``max_tokens``, with its problem.
        """
        tokens = list(self._encode(problem, response))
        if not 0 < len(tokens) <= self.max_tokens:
            raise LostError(f"an answer to problem {problem.problem_id!r} has {len(tokens)} tokens with it, max_tokens={self.max_tokens}")
        loop, waiting = asyncio.get_running_loop(), of_this_loop(self._waiting, _Waiting)
        value: asyncio.Future[float] = loop.create_future()
        waiting.entries.append((tokens, value))
        if waiting.task is None:
            waiting.task = loop.create_task(self._score_all(waiting))
        return await value

    async def _score_all(self, waiting: _Waiting) -> None:
        try:
            while waiting.entries:
                # Whoever comes at the same time goes along; whoever gave up does not.
                await asyncio.sleep(0)
                entries = [entry for entry in waiting.entries if not entry[1].done()]
                batch, waiting.entries = entries[: self.max_batch_size], entries[self.max_batch_size :]
                if batch:
                    await self._score_batch(batch)
        finally:
            waiting.task = None

    async def _score_batch(self, batch: Sequence[tuple[list[int], "asyncio.Future[float]"]]) -> None:
        try:
            values = await asyncio.to_thread(self._values, [tokens for tokens, _ in batch])
        except Exception as error:
            for _, value in batch:
                if not value.done():
                    value.set_exception(LostError(f"the reward model failed: {error!r}"))
            return
        for (_, value), number in zip(batch, values, strict=True):
            if not value.done():
                value.set_result(number)

    def _values(self, rows: Sequence[Sequence[int]]) -> list[float]:
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = torch.tensor(row)
        valid = torch.arange(tokens.shape[1]) < lengths[:, None]
        device = self.head.weight.device
        batch = Batch(tokens=tokens.to(device), labels=tokens.to(device), loss_mask=valid.float().to(device), valid=valid.to(device))
        # The first GPU is the current one of a new thread, and the model may be on another.
        with self._lock, torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            [values] = score(self.model, [batch], lambda output, _: self.head(output.hidden), groups=self.head.groups)
            return values.cpu()[torch.arange(len(rows)), lengths - 1].tolist()
