# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""JSON values and bytes between ranks: nothing that arrives can run."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.comm import all_gather, all_to_all


def broadcast_json(value: Any, group: Group, source: int, device: torch.device) -> Any:
    """What rank ``source`` of the group holds, on all its ranks."""
    if group.size == 1:
        return value
    data = encode_json(value, device)
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, group=group.pg, group_src=source)
    if group.rank != source:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group.pg, group_src=source)
    return decode_json(data)


def all_gather_json(value: Any, group: Group, device: torch.device) -> list[Any]:
    """The values of all ranks of the group, in rank order."""
    if group.size == 1:
        return [value]
    data = encode_json(value, device)
    lengths = all_gather(torch.tensor([len(data)], device=device), group).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    rows = all_gather(padded, group).view(group.size, -1)
    return [decode_json(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def all_to_all_bytes(parcels: Sequence[Tensor], sizes: Sequence[int], group: Group, device: torch.device) -> list[Tensor]:
    """On the host, what each rank of the group sends to this one.

    Args:
        parcels: uint8, for each rank.
        sizes: bytes that come from each rank.
        group: all its ranks call it.
        device: where tensors must be to go over the group.
    """
    sent = torch.cat(list(parcels)).to(device)
    return list(all_to_all(sent, sizes, [len(parcel) for parcel in parcels], group).cpu().split(list(sizes)))


def encode_json(value: Any, device: torch.device) -> Tensor:
    """The bytes of a JSON value."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def decode_json(data: Tensor) -> Any:
    """The value of such bytes."""
    return json.loads(data.cpu().numpy().tobytes())


def device_of(group: Group) -> torch.device:
    """Where tensors must be to go over a group."""
    on_gpu = group.pg is not None and dist.get_backend(group.pg) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
