# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Batch sizes as a function of consumed samples."""

import pytest

from mcore_parallel.training import BatchRampUp, BatchSizeSteps, ConstantBatchSize, check_batch_sizes, samples_after


def test_a_ramp_grows_in_equal_shares_of_its_samples() -> None:
    ramp = BatchRampUp(start=16, increment=8, ramp_samples=1000, global_batch_size=40)
    table = {0: 16, 333: 16, 334: 24, 666: 24, 667: 32, 999: 32, 1000: 40, 10**18: 40}
    assert {consumed: ramp.size(consumed) for consumed in table} == table
    assert ramp.sizes() == (16, 24, 32, 40)
    # A start that is the end is a constant.
    assert BatchRampUp(start=8, increment=8, ramp_samples=5, global_batch_size=8).size(3) == 8
    # Beyond what a double holds exactly.
    large = BatchRampUp(start=1, increment=1, ramp_samples=3 * 2**60, global_batch_size=4)
    assert (large.size(2**60 - 1), large.size(2**60)) == (1, 2)


def test_steps_are_read_with_suffixes_in_samples_or_tokens() -> None:
    steps = BatchSizeSteps.parse("0:256 1K:512, 2m:1024,3B:8")
    table = {0: 256, 999: 256, 1000: 512, 1_999_999: 512, 2_000_000: 1024, 3 * 10**9: 8}
    assert {consumed: steps.size(consumed) for consumed in table} == table
    assert BatchSizeSteps.parse("0:4 1K:8", seq_length=300).steps == ((0, 4), (3, 8))


@pytest.mark.parametrize(
    ("text", "words"),
    [("1:4", "must be 0"), ("", "must be 0"), ("0:4 5:8 5:16", "must ascend"), ("0:4 x:8", "'x:8'"), ("0:0", "size at 0=0")],
)
def test_bad_steps_name_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BatchSizeSteps.parse(text)


def test_sizes_that_do_not_divide_are_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size=40 is not start=16 plus a multiple of increment=7"):
        BatchRampUp(start=16, increment=7, ramp_samples=10, global_batch_size=40)
    with pytest.raises(ValueError, match=r"\[12, 20\] are not multiples of micro_batch_size=4 \* dp=2 = 8"):
        check_batch_sizes(BatchRampUp(start=8, increment=4, ramp_samples=10, global_batch_size=24), 4, 2)
    check_batch_sizes(ConstantBatchSize(global_batch_size=24), 4, 2)


@pytest.mark.parametrize(
    "schedule",
    [
        ConstantBatchSize(global_batch_size=5),
        BatchRampUp(start=2, increment=3, ramp_samples=40, global_batch_size=11),
        BatchSizeSteps.parse("0:8 20:2 30:4"),
        BatchSizeSteps.parse("0:2 20:8"),
    ],
)
def test_samples_of_a_run_are_the_sum_of_its_steps(schedule: ConstantBatchSize | BatchRampUp | BatchSizeSteps) -> None:
    consumed = 0
    for step in range(30):
        assert samples_after(schedule, step) == consumed
        consumed += schedule.size(consumed)
