# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where checkpoints lie: the disk, an object store, memory, or any object with the methods of `Folder`.

Example:
    >>> import torch
    >>> from mcore_ckpt import load, save
    >>> place = MemoryFolder()
    >>> save({"w": torch.ones(2)}, place.child("a"))
    >>> state = {"w": torch.zeros(2)}
    >>> load(state, place.child("a"))
    {}
    >>> state["w"]
    tensor([1., 1.])
"""

from mcore_ckpt._storage import Folder, LocalFolder, MemoryFolder, ObjectFolder, open_folder

__all__ = ["Folder", "LocalFolder", "MemoryFolder", "ObjectFolder", "open_folder"]
