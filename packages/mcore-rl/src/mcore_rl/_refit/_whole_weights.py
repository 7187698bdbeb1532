# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whole weights, put together from boxes that come in several buckets: for engines that take no slices."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mcore_ckpt.chunks import Box
from mcore_rl._refit._schedule import Schedule


class WholeWeights:
    """The weights of one refit that are not whole yet.

    Args:
        schedule: names, shapes and dtypes.
        device: where they are put together.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self._schedule, self._device = schedule, device
        self._begun: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    def take(
        self, names: Sequence[str], held: Mapping[tuple[str, Box], Tensor], boxes: Iterable[tuple[str, Box, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights that are whole with one more bucket.

        Args:
            names: with a box in it.
            held: what this rank has of them; a tensor that is all of a weight is handed over as it is.
            boxes: of the bucket, each copied before the next one is asked for.
        """
        own: dict[str, Tensor] = {}
        for name in names:
            shape = self._schedule.shapes[name]
            if (whole := held.get((name, Box.whole(shape)))) is not None:
                own[name] = whole
            elif name not in self._begun:
                self._begun[name] = torch.empty(shape, dtype=self._schedule.dtypes[name], device=self._device)
            self._missing.setdefault(name, math.prod(shape))
        for name, box, tensor in boxes:
            self._missing[name] -= box.num_elements
            if name not in own:
                self._begun[name][box.slices()] = tensor
        for name in names:
            if self._missing[name] == 0:
                yield name, own[name] if name in own else self._begun.pop(name)
