# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Environments whose problems have numbers, of one turn or of several: ranks share them, and a run goes on where it was."""

import asyncio
import functools
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, overload

from mcore_rl._stability import experimental_api
from mcore_rl.agent._base import all_at_once
from mcore_rl.agent._conversation import Conversation, TurnLimits
from mcore_rl.agent._conversation_memory import ConversationMemory
from mcore_rl.agent._environment_messages import as_chat
from mcore_rl.agent._judged import JudgedAgent, Problem
from mcore_rl.agent._multi_turn import Episode, MultiTurnAgent, replayed
from mcore_rl.agent._reward_only import RewardOnlyAgent
from mcore_rl.agent._stream_position import StreamPosition

T = TypeVar("T")
MOST_EPISODES = 1024
"""Conversations that an environment keeps between two of their turns."""


def ignore_turn() -> None:
    """Nobody times the turns that are replayed."""


async def within_own_limit(environment: JudgedAgent, call: Awaitable[T]) -> T:
    """What an environment gives, within its own limit of time.

    Raises:
        TimeoutError: it takes longer; names environment and limit.
    """
    limit = asyncio.timeout(environment.judge_timeout_s)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise
        name, limit_s = environment.env_id, environment.judge_timeout_s
        raise TimeoutError(f"environment {name!r} took longer than judge_timeout_s={limit_s:g}") from error


@experimental_api
class NumberedAgent(JudgedAgent):
    """Problem n is the same on every machine. Rank r of n poses every n-th problem, from a position on.

    Each evaluation asks the same problems, whose numbers begin at 2**32. A subclass is `NumberedProblems` or `NumberedConversations`.
    """

    FIRST_EVALUATION: ClassVar[int] = 1 << 32
    """Number of the first problem of an evaluation."""

    _stream: StreamPosition = StreamPosition()
    _rank: int = 0
    _num_ranks: int = 1
    _num_posed: int = 0
    _num_evaluated: int = 0

    @property
    def turn_limits(self) -> Mapping[str, TurnLimits | None]:
        """Of each environment that it is made of, by name, how long its conversations are; None for one of single answers."""
        return dict.fromkeys(self.env_ids)

    def _limits_of(self, problem: Problem) -> TurnLimits | None:
        """How long conversations about a problem are; None for one of a single answer. A name of the problem's own counts as the
        environment's.

        Raises:
            ValueError: this is a mixture, and the problem has a name that none of its environments has.
        """
        known = self.turn_limits
        for name in (problem.env_id, self.env_id):
            if name in known:
                return known[name]
        first, *others = known.values()
        if any(other != first for other in others):
            raise ValueError(
                f"problem {problem.problem_id!r} has env_id={problem.env_id!r}, which is none of {', '.join(known)}; name it in env_ids of "
                "its environment"
            )
        return first

    @property
    def holds_conversations(self) -> bool:
        """Whether it needs a `ChatInferenceInterface`, as one of its environments does."""
        return any(limits is not None for limits in self.turn_limits.values())

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """That the policy may call, in OpenAI's form: what a run passes to ``MegatronChatLocal(tools=)``."""
        return ()

    @property
    def env_ids(self) -> tuple[str, ...]:
        """Names that its rollouts have: its own, those of the environments that it is made of, or those that its problems set."""
        return (self.env_id,)

    @abstractmethod
    def problem(self, number: int) -> Problem:
        """Problem ``number``, from 0; from 2**32 on, one of the evaluation."""

    def num_problems(self, *, validation: bool = False) -> int:
        """Different problems of training, or of evaluations: as many as there are numbers, where a subclass says nothing else."""
        return self.FIRST_EVALUATION

    def get_dataset(self, *, validation: bool = False) -> Sequence[Problem]:
        """The first ``num_problems`` of training, or of evaluations, made as they are read; whatever has been posed, on every rank.

        Example:
            >>> [problem.prompt for problem in Capitals().get_dataset()[:2]]
            ['river:', 'stone:']
        """
        first = self.FIRST_EVALUATION if validation else 0
        return _Dataset(self, range(first, first + self.num_problems(validation=validation)))

    def attempt(self, problem: Problem, generator: random.Random) -> str | None:
        """A well-formed answer, right or wrong, for a model that has yet to learn the form; None where every text is one."""
        return None

    def attempt_turns(self, problem: Problem, generator: random.Random) -> Sequence[str] | None:
        """The policy's answers of a well-formed conversation, right or wrong, for a model that has yet to learn the form; None where every
        text is one, and of a problem of a single answer. ``recite`` holds it."""
        return None

    async def _opening(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        """The first messages of a conversation, for one that is held elsewhere.

        Raises:
            TypeError: it holds none.
        """
        raise TypeError(f"environment {self.env_id!r} judges single answers and holds no conversation")

    async def _reply(
        self, conversation: Conversation, answer: str, on_turn: Callable[[], None] = ignore_turn
    ) -> Sequence[Mapping[str, Any]]:
        """What is said to an answer; none ends the conversation. ``on_turn`` and errors as of ``replayed`` and ``_opening``."""
        raise TypeError(f"environment {self.env_id!r} judges single answers and holds no conversation")

    async def _outcome(self, conversation: Conversation, on_turn: Callable[[], None] = ignore_turn) -> float:
        """How good a conversation was; arguments and errors as of ``_reply``."""
        raise TypeError(f"environment {self.env_id!r} judges single answers and holds no conversation")

    def _forget(self, conversation: Conversation) -> None:
        """Keep nothing of a conversation that has ended, and whose reward is not asked for here."""

    def _forget_episodes(self) -> None:
        """Keep no conversation between its turns; those that go on are replayed."""

    def start_at(self, position: int | StreamPosition, *, rank: int = 0, num_ranks: int = 1) -> None:
        """Pose problems ``position + rank``, ``position + rank + num_ranks``, ... from now on; or go on where ranks were in a stream.

        Raises:
            ValueError: a position or a rank out of its range.
        """
        stream = StreamPosition(first=position) if isinstance(position, int) else position
        if not (0 <= stream.first < self.FIRST_EVALUATION and 0 <= rank < num_ranks):
            raise ValueError(f"position={position} must lie from 0 to below 2**32, and rank={rank} from 0 to below num_ranks={num_ranks}")
        self._stream, self._rank, self._num_ranks = stream.shared_by(num_ranks), rank, num_ranks
        self._num_posed, self._num_evaluated = self._stream.num_taken[rank], 0

    @property
    def num_posed(self) -> int:
        """Problems that this rank has posed of its share of the stream, those of evaluations not among them; what a `StreamPosition`
        counts."""
        return self._num_posed

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        if validation:
            self._num_evaluated += 1
            return await self._posed(self.FIRST_EVALUATION + self._rank + (self._num_evaluated - 1) * self._num_ranks)
        self._num_posed += 1
        number = self._stream.number(self._rank + (self._num_posed - 1) * self._num_ranks)
        try:
            return await self._posed(number)
        except Exception as error:
            error.add_note(f"problem {number}")
            raise

    async def evaluation_prompts(self, num_prompts: int, *, validation: bool = True) -> list[Problem]:
        """This rank's share, the same whenever it is asked: the first of the evaluation, or of training, which poses none of them."""
        first = self.FIRST_EVALUATION if validation else 0
        numbers = [first + self._rank + place * self._num_ranks for place in range(num_prompts)]
        return await all_at_once([self._in_time(functools.partial(self._posed, number)) for number in numbers])

    async def _posed(self, number: int) -> Problem:
        """``problem(number)``; where that waits for another process, without holding up the event loop."""
        return self.problem(number)


@experimental_api
class NumberedProblems(NumberedAgent, RewardOnlyAgent):
    """Numbered problems of one turn: a subclass gives ``problem(number)`` and ``get_reward``.

    Args:
        env_id: as of ``RewardOnlyAgent``, and so are the three limits.
        prompt_timeout_s: of a problem, in seconds.
        answer_timeout_s: of an answer.
        judge_timeout_s: of its reward.
    """


@experimental_api
class NumberedConversations(NumberedAgent, MultiTurnAgent):
    """Numbered problems of several turns: a subclass gives ``problem(number)`` and ``begin``, and ``tools`` where it has some.

    Arguments and errors as of `MultiTurnAgent`.
    """

    @property
    def turn_limits(self) -> Mapping[str, TurnLimits | None]:
        return dict.fromkeys(self.env_ids, TurnLimits(max_turns=self.max_turns, max_tokens=self.max_tokens))

    @property
    def _episodes(self) -> ConversationMemory[Episode]:
        """Of conversations that are held elsewhere, between two turns; none where ``resume`` makes them."""
        # One, whatever threads ask first: `functools.cached_property` makes several from Python 3.12 on.
        return vars(self).setdefault("_own_episodes", ConversationMemory(MOST_EPISODES))

    async def _opening(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        episode = self.begin(problem)
        opening = as_chat(await episode.start())
        begun = Conversation(problem=problem, opening=opening)
        if self.resume(begun) is None:
            self._episodes.put(begun, episode)
        return opening

    async def _reply(
        self, conversation: Conversation, answer: str, on_turn: Callable[[], None] = ignore_turn
    ) -> Sequence[Mapping[str, Any]]:
        episode, is_own = await self._gone_on(conversation, on_turn)
        replies = as_chat(await episode.reply(answer))
        if is_own:
            # One that failed is not gone on with.
            self._episodes.put(conversation.with_turn(answer, replies), episode)
        return replies

    async def _outcome(self, conversation: Conversation, on_turn: Callable[[], None] = ignore_turn) -> float:
        episode, _ = await self._gone_on(conversation, on_turn)
        return await episode.reward()

    async def _gone_on(self, conversation: Conversation, on_turn: Callable[[], None]) -> tuple[Episode, bool]:
        """The episode of a conversation as it stands, and whether it waits for its next turn here, too."""
        if (episode := self.resume(conversation)) is not None:
            return episode, False
        if (episode := self._episodes.take(conversation)) is None:
            episode = await replayed(self, conversation, on_turn)
        return episode, True

    def _forget(self, conversation: Conversation) -> None:
        self._episodes.take(conversation)

    def _forget_episodes(self) -> None:
        self._episodes.clear()


class _Dataset(Sequence[Problem]):
    """Problems of these numbers."""

    def __init__(self, environment: NumberedAgent, numbers: range) -> None:
        self._environment, self._numbers = environment, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Problem: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Problem]: ...

    def __getitem__(self, place: int | slice) -> Problem | Sequence[Problem]:
        numbers = self._numbers[place]
        return _Dataset(self._environment, numbers) if isinstance(numbers, range) else self._environment.problem(numbers)
