# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Garbage collection around a capture."""

import gc
from collections.abc import Iterator

import pytest
import torch

from mcore_parallel.graphs import (
    CUDA_GRAPH_CAPTURE_FREEZE_GC,
    FREEZE_GC_MAX_TORCH_VERSION,
    collection_paused,
    freeze_gc_choice,
)


def test_nothing_is_collected_during_a_capture_and_everything_is_as_before() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collections_come_back_behind_the_last_of_several_threads_and_not_before() -> None:
    first, second = collection_paused(), collection_paused()
    first.__enter__()
    second.__enter__()
    # As of two threads: the one that began first ends first.
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    """As before the tests were collected, and after it as before the test."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_is_frozen")
def test_whether_what_exists_is_frozen_follows_the_choice_the_version_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # What was loaded when the tests were collected.
    gc.unfreeze()
    for choice, frozen in ((True, True), (False, False), (None, False)):
        with collection_paused(choice):
            assert bool(gc.get_freeze_count()) == frozen
        assert not gc.get_freeze_count() and gc.isenabled()
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.0"))
    assert torch.__version__ < FREEZE_GC_MAX_TORCH_VERSION
    with collection_paused():
        assert gc.get_freeze_count()
    assert freeze_gc_choice({CUDA_GRAPH_CAPTURE_FREEZE_GC: "0"}) is False
    assert freeze_gc_choice({CUDA_GRAPH_CAPTURE_FREEZE_GC: "1"}) is None is freeze_gc_choice({})
