# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pairs of a preferred and a rejected answer that somebody wrote down."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, TokenRollout
from mcore_rl.agent._contrastive import ContrastiveRollout, ContrastiveRolloutGenerator
from mcore_rl.agent._stream_position import StreamPosition
from mcore_rl.inference import InferenceInterface

_NAMES = ("prompt", "chosen", "rejected")


class _Tokenizer(Protocol):
    """Text to ids."""

    @property
    def eod(self) -> int | None: ...
    def tokenize(self, text: str, /) -> Sequence[int]: ...


@experimental_api
class PreferencePairs(ContrastiveRolloutGenerator):
    """The pairs of a file of JSON lines with ``prompt``, ``chosen`` and ``rejected``, all texts; no engine is asked.

    Pair n is the same on every machine; rank r of n takes every n-th, from a position on: each of the file once, then again in another
    order. Answers end with the tokenizer's end of document, where it has one.

    Args:
        path: of the file.
        tokenizer: of the policy.
        max_tokens: of prompt and answer together.
        num_evaluation: first pairs of the file, which are not trained on.
        seed: of the order.

    Raises:
        ValueError: no file, a line that is no pair, two equal answers, one that is too long, or too few pairs; names file and line.
    """

    def __init__(self, path: str | Path, tokenizer: _Tokenizer, *, max_tokens: int, num_evaluation: int = 0, seed: int = 0) -> None:
        if num_evaluation < 0:
            raise ValueError(f"num_evaluation={num_evaluation} must not be negative")
        rows = _read(Path(path), tokenizer, max_tokens)
        if len(rows) <= num_evaluation:
            raise ValueError(f"{path} has {len(rows)} pairs, num_evaluation={num_evaluation} of which are not trained on; lower it")
        self.evaluation: list[ContrastiveRollout] = rows[:num_evaluation]
        """Pairs that are not trained on."""
        self._trained, self._seed = rows[num_evaluation:], seed
        self.start_at(0)

    def start_at(self, position: int | StreamPosition, *, rank: int = 0, num_ranks: int = 1) -> None:
        """Take pairs ``position + rank``, ``position + rank + num_ranks``, ... from now on; or go on where ranks were in a stream."""
        stream = StreamPosition(first=position) if isinstance(position, int) else position
        self._stream, self._rank, self._num_ranks = stream.shared_by(num_ranks), rank, num_ranks
        self._num_posed = self._stream.num_taken[rank]

    @property
    def num_posed(self) -> int:
        """Pairs that this rank has taken of its share of the stream; what a `StreamPosition` counts."""
        return self._num_posed

    async def get_contrastive_rollouts(
        self, interface: InferenceInterface | None, *, num_pairs: int, args: GenericGenerationArgs, timeout_s: float | None = None
    ) -> list[ContrastiveRollout]:
        """The next ``num_pairs`` pairs of this rank."""
        numbers = [self._stream.number(self._rank + (self._num_posed + i) * self._num_ranks) for i in range(num_pairs)]
        self._num_posed += num_pairs
        return [self._trained[self._order(epoch)[place]] for epoch, place in (divmod(number, len(self._trained)) for number in numbers)]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._trained)))
        random.Random(f"pairs {self._seed} {epoch}").shuffle(order)
        return order


def _read(path: Path, tokenizer: _Tokenizer, max_tokens: int) -> list[ContrastiveRollout]:
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file; name one of JSON lines with {', '.join(_NAMES)}")
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value: Any = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                raise ValueError(f"{where} is no JSON; write one pair a line") from None
            if not isinstance(value, Mapping) or not all(isinstance(value.get(name), str) and value[name] for name in _NAMES):
                raise ValueError(f'{where} must be {{"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}}, found {line.strip()[:60]}')
            if value["chosen"] == value["rejected"]:
                raise ValueError(f"{where} prefers an answer to itself; leave the line out")
            prompt, chosen, rejected = (list(tokenizer.tokenize(value[name])) for name in _NAMES)
            end = [] if tokenizer.eod is None else [tokenizer.eod]
            length = len(prompt) + max(len(chosen), len(rejected)) + len(end)
            if length > max_tokens:
                raise ValueError(f"{where} has {length} tokens, and {max_tokens} fit; raise train.seq_len, or leave the line out")
            answers = (_answer(prompt, chosen + end, 1.0, number), _answer(prompt, rejected + end, 0.0, number))
            rows.append(ContrastiveRollout(chosen=answers[0], rejected=answers[1]))
    return rows


def _answer(prompt: list[int], written: list[int], reward: float, number: int) -> TokenRollout:
    return TokenRollout(
        trajectory=(*prompt, *written),
        reward=reward,
        generation_mask=(False,) * len(prompt) + (True,) * len(written),
        # No engine drew it.
        logprobs=(0.0,) * len(written),
        env_id="pairs",
        problem_id=f"line {number}",
    )
