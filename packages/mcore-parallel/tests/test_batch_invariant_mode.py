# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The scope in which backends are batch-invariant where nothing is said."""

import threading

import pytest

from mcore_parallel import ProcessGroups
from mcore_parallel.backends import Fp8Config, TorchBackend, choose_backend, is_batch_invariant_mode_enabled, set_batch_invariant_mode
from mcore_parallel.models import GPTModel, TransformerConfig


def made(**options: bool) -> bool:
    backend = choose_backend("torch", **options)
    assert isinstance(backend, TorchBackend)
    return backend.batch_invariant


def test_a_block_is_the_default_of_the_argument_and_ends_with_it() -> None:
    assert not is_batch_invariant_mode_enabled() and not made()
    with set_batch_invariant_mode(True):
        assert is_batch_invariant_mode_enabled() and made() and not made(batch_invariant=False)
        with set_batch_invariant_mode(False):
            assert not is_batch_invariant_mode_enabled() and not made() and made(batch_invariant=True)
        assert made()
    with pytest.raises(KeyError), set_batch_invariant_mode():
        assert made()
        raise KeyError
    assert not is_batch_invariant_mode_enabled() and not made()


def test_a_model_keeps_what_it_was_made_with() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32)
    before = GPTModel(config, ProcessGroups.single())
    with set_batch_invariant_mode(True):
        inside = GPTModel(config, ProcessGroups.single())
    assert isinstance(before.backend, TorchBackend) and isinstance(inside.backend, TorchBackend)
    assert (before.backend.batch_invariant, inside.backend.batch_invariant) == (False, True)
    layer = inside.layers["0"]
    assert layer.input_norm.batch_invariant and layer.mixer.spec.batch_invariant


def test_a_block_holds_for_its_own_thread() -> None:
    seen: list[bool] = []
    with set_batch_invariant_mode(True):
        thread = threading.Thread(target=lambda: seen.append(made()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_what_excludes_batch_invariance_is_refused_in_a_block() -> None:
    with set_batch_invariant_mode(True):
        with pytest.raises(ValueError, match="batch_invariant=True excludes fp8"):
            choose_backend("torch", fp8=Fp8Config(recipe="rowwise"))
        with pytest.raises(ValueError, match='batch_invariant=True needs the matmuls of backend="torch"'):
            choose_backend("te")
    with pytest.raises(ValueError, match="enabled=1 must be True or False"), set_batch_invariant_mode(1):  # pyright: ignore[reportArgumentType]
        pass
