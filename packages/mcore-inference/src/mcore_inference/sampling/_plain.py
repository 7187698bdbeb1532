# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Plain draws, greedy or at a temperature, whose settings lie where a recording of a step reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.sampling._params import SamplingParams

_HEADER, _FIELDS = 4, 5


# R rows (requests) of a step, V columns of the logits, N parts of them.
@experimental_api
@dataclass(frozen=True, kw_only=True)
class PlainRows:
    """What R requests ask of plain draws, on the host."""

    temperature_R: np.ndarray
    """[R] float32; 0 for greedy."""
    seed_R: np.ndarray
    """[R] int64."""
    position_R: np.ndarray
    """[R] int64, tokens generated before."""
    processed_R: np.ndarray
    """[R], as of ``DrawRows``."""
    wants_log_probs: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> "PlainRows | None":
        """Rows in the order given; None where one asks for more: top-k, top-p, min-p, or the best tokens of a place."""
        if not all(map(_is_plain, params)):
            return None
        return cls(
            temperature_R=np.array([0.0 if p.is_greedy else p.temperature for p in params], dtype=np.float32),
            seed_R=np.array(seeds, dtype=np.int64),
            position_R=np.array(positions, dtype=np.int64),
            processed_R=np.array([p.processed_log_probs for p in params]),
            wants_log_probs=any(p.return_log_probs for p in params),
        )

    @staticmethod
    def num_words(num_rows: int) -> int:
        """Of ``words``."""
        return _HEADER + _FIELDS * num_rows

    def words(self, num_rows: int) -> np.ndarray:
        """What ``PlainInputs.words`` holds, int32: these rows, and padding."""
        words = np.zeros(self.num_words(num_rows), dtype=np.int32)
        real = len(self.seed_R)
        words[0] = 2 if self.wants_log_probs else 1
        fields = words[_HEADER:].reshape(_FIELDS, num_rows)[:, :real]
        fields[0] = self.temperature_R.view(np.int32)
        # The low half first, on the machines that GPUs are in.
        fields[1:3] = self.seed_R.view(np.int32).reshape(real, 2).T
        fields[3], fields[4] = self.position_R, self.processed_R
        return words


def _is_plain(params: SamplingParams) -> bool:
    keeps_all = params.top_k <= 0 and params.top_p in (0.0, 1.0) and params.min_p == 0
    return not params.top_n_logprobs and (params.is_greedy or keeps_all)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PlainInputs:
    """Plain draws of R rows on the device."""

    words: Tensor
    """int32: 0 for no draws, 1 for tokens, 2 for log-probabilities too, and padding of three; of each row the bits of its temperature,
    then the low and the high halves of seeds, positions, and 1 where the log-probability is the one by which the token was drawn."""
    lines_R: Tensor
    """[R] int32, of ``Sampler.last_tokens``; -1 for padding."""

    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperatures [R] float32, and seeds, positions and kinds of log-probability [R] int64."""
        temperature_R, low_R, high_R, position_R, processed_R = self.words[_HEADER:].view(_FIELDS, -1)
        seed_R = (low_R.long() & 0xFFFFFFFF) | (high_R.long() << 32)
        return temperature_R.view(torch.float32), seed_R, position_R.long(), processed_R.long()


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PartSums:
    """What a draw needs to know of each part of R rows of logits."""

    part: ClassVar[int] = 64
    """Its ids."""
    best_RN: Tensor
    """[R, N] float32, the best logit; NaN where one is NaN."""
    weight_RN: Tensor
    """[R, N] float32, the sum of weights beside the best."""
    raw_RN: Tensor
    """[R, N] float32, the log-sum of all logits."""

    @classmethod
    def empty(cls, num_rows: int, num_columns: int, device: torch.device) -> "PartSums":
        """Of logits [R, V], which a kernel fills in."""
        # One by one: kernels are compiled for addresses.
        shape = num_rows, -(-num_columns // cls.part)
        best_RN, weight_RN, raw_RN = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3))
        return cls(best_RN=best_RN, weight_RN=weight_RN, raw_RN=raw_RN)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PlainSums(PartSums):
    """Those of plain draws, for the kernel that computes their logits."""

    words: Tensor
    """Of ``PlainInputs``."""
    vocab_size: int
    """Ids that exist."""


@experimental_api
class PackedDraws:
    """Tokens and log-probabilities of R rows on their way to the host in one copy; nobody waits until ``wait``.

    Args:
        results_R2: int64, token (-1 where no score was finite) and bits of the log-probability in float64; the next step may overwrite it.
        wants_log_probs: whether they mean something.
    """

    def __init__(self, results_R2: Tensor, *, wants_log_probs: bool) -> None:
        device = results_R2.device
        self._results_R2, self._wants_log_probs = results_R2.to("cpu", non_blocking=True, copy=True), wants_log_probs
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> list[tuple[int, float, dict[int, float]]]:
        """As of ``Draws``."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, bits = self._results_R2.unbind(1)
        values = bits.contiguous().view(torch.float64).tolist() if self._wants_log_probs else [0.0] * len(tokens)
        nothing: dict[int, float] = {}
        return [(token, value, nothing) for token, value in zip(tokens.tolist(), values, strict=True)]
