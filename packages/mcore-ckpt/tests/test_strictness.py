# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a load does about tensors that are missing, unexpected or of another shape."""

import warnings

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, Mismatches, Strictness, find_mismatches, load, save


@pytest.fixture
def stored(tmp_path):
    CheckpointManager(tmp_path).save(1, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}, {"x": 1})
    return tmp_path / "step_00000001"


def requested_state():
    return {"a": torch.zeros(2), "b": torch.zeros(5), "z": torch.zeros(1)}


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ({}, "missing from the checkpoint: z; other global shape: b"),
        ({"missing": "warn"}, r"does not fit: other global shape: b \(stored \[3\], asked \[5\]\)$"),
        ({"shape": "ignore"}, "does not fit: missing from the checkpoint: z$"),
        ({"missing": "ignore", "shape": "warn"}, "holds tensors nobody asks for: c; pass strict=False"),
    ],
)
def test_what_is_not_allowed_is_raised_with_nothing_written(stored, modes, words):
    state = requested_state()
    with pytest.raises(CheckpointingException, match=words), warnings.catch_warnings():
        warnings.simplefilter("error")
        load(state, stored, strict=Strictness(**modes))
    assert not any(value.any() for value in state.values())


def test_what_is_allowed_keeps_its_values_and_the_rest_is_filled(stored):
    state = requested_state()
    manager = CheckpointManager(stored.parent)
    assert manager.load(state, strict=Strictness(missing="ignore", unexpected="ignore", shape="ignore")) == (1, {"x": 1})
    assert state["a"].all() and not state["b"].any() and not state["z"].any()
    state = requested_state()
    with pytest.warns(RuntimeWarning) as caught:
        load(state, stored, strict=Strictness(missing="warn", unexpected="warn", shape="warn"))
    (text,) = [str(one.message) for one in caught]
    assert "missing from the checkpoint: z; other global shape: b (stored" in text and text.endswith("nobody asks for: c")
    assert state["a"].all()


def test_another_element_type_is_always_an_error(stored):
    lax = Strictness(missing="ignore", unexpected="ignore", shape="ignore")
    with pytest.raises(CheckpointingException, match="other dtype: a"):
        load({"a": torch.zeros(2, dtype=torch.float64)}, stored, strict=lax)
    with pytest.raises(ValueError, match="missing='skip' must be one of raise, warn, ignore"):
        Strictness(missing="skip")


def test_mismatches_are_found_without_loading(stored):
    state = requested_state() | {"c": torch.zeros(4, dtype=torch.int64)}
    mismatches = find_mismatches(state, stored)
    shapes, dtypes = ("b (stored [3], asked [5])",), ("c (stored F32, asked I64)",)
    assert mismatches == Mismatches(missing=("z",), shapes=shapes, dtypes=dtypes) and mismatches
    assert not state["a"].any() and not find_mismatches({name: torch.zeros(n) for name, n in zip("abc", (2, 3, 4), strict=True)}, stored)


def check_ranks_agree(folder):
    rank = dist.get_rank()
    save({"a": torch.ones(2), "b": torch.ones(2)}, folder)
    state = {"a": torch.zeros(2)} if rank else {"y": torch.zeros(3)}
    mismatches = find_mismatches(state, folder)
    assert mismatches == Mismatches(missing=("y",), unexpected=("b",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(state, folder, strict=Strictness(missing="warn", unexpected="warn"))
    assert all(value.all() == (name == "a") for name, value in state.items())
    try:
        load(state, folder, strict=Strictness(unexpected="ignore"))
    except CheckpointingException as error:
        return [str(one.message) for one in caught], str(error)
    return None


@pytest.mark.world(2)
def test_one_rank_warns_for_all_and_all_raise_alike(world, tmp_path):
    (first, error), (second, other) = world(check_ranks_agree, folder=str(tmp_path / "c"))
    assert len(first) == 1 and not second and error == other and "on rank 0" in error


def test_strict_on_and_off_are_two_of_these(stored):
    state = {"a": torch.zeros(2)}
    load(state, stored, strict=False)
    assert state["a"].all()
