# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Proposals by prompt lookup: what followed the last tokens when they stood in the text before."""

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api


@experimental_api
@dataclass(frozen=True, kw_only=True)
class NgramSpeculation:
    """Verify several tokens a step, proposed from the request's own prompt and output.

    The model scores the proposals in one step. Each position is drawn as it would be without proposals, by the same random number, and the
    proposals count as far as the draws equal them. So every token, greedy or sampled, is the one of the engine without speculation wherever
    the logits are the same; kernels for several tokens of a request may round them otherwise than those for one.

    Raises:
        ValueError: a field is out of its range.
    """

    num_tokens: int = 4
    """Tokens proposed for each request and step, at most."""
    max_ngram: int = 4
    """Longest run of last tokens that is looked for; longer runs go first."""
    min_ngram: int = 2
    """Shortest run."""

    def __post_init__(self) -> None:
        as_integer("num_tokens", self.num_tokens, 1, 64)
        as_integer("max_ngram", self.max_ngram, 1, 32)
        as_integer("min_ngram", self.min_ngram, 1, self.max_ngram)


@experimental_api
class NgramDrafter:
    """The text of one request, and where each run of tokens stood last; a token costs a few look-ups whatever the length of the text.

    Args:
        config: lengths.
        tokens: of the prompt.

    Example:
        >>> NgramDrafter(NgramSpeculation(num_tokens=3), [5, 6, 7, 8, 5, 6]).propose()
        [7, 8, 5]
    """

    def __init__(self, config: NgramSpeculation, tokens: Iterable[int]) -> None:
        self._config = config
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Append a token. Only now the runs before it have a token that follows."""
        end = len(self._tokens)
        for length in range(self._config.min_ngram, min(self._config.max_ngram, end) + 1):
            self._following[tuple(self._tokens[end - length :])] = end
        self._tokens.append(token)

    def propose(self, limit: int | None = None) -> list[int]:
        """Tokens that may come next, at most ``limit``; none where the last tokens are new."""
        count = self._config.num_tokens if limit is None else min(limit, self._config.num_tokens)
        for length in range(min(self._config.max_ngram, len(self._tokens)), self._config.min_ngram - 1, -1):
            start = self._following.get(tuple(self._tokens[-length:]))
            if start is not None:
                # Where the text before ends at the present one, it goes on as it repeats.
                period = len(self._tokens) - start
                return [self._tokens[start + place % period] for place in range(count)]
        return []
