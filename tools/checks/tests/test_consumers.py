# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which release is compared, and when a failure of it counts."""

from packaging.requirements import Requirement
from packaging.version import Version

from tools.checks.consumers import Release, concerned, failures, newest_tags


def test_the_highest_versions_win_not_the_last_names():
    tags = ["mcore-moe-v0.2.0", "mcore-moe-v0.10.0", "mcore-parallel-v9.0.0", "mcore-moe-v0.9.0", "nightly"]
    assert newest_tags("mcore-moe", tags, 1) == ["mcore-moe-v0.10.0"]
    assert newest_tags("mcore-moe", tags, 2) == ["mcore-moe-v0.10.0", "mcore-moe-v0.9.0"]
    assert newest_tags("mcore-rl", tags, 2) == []


def release(wheel: str, *needs: str, version: str = "0.1.0") -> Release:
    dependencies = tuple(Requirement(f"{name}>=0.1,<0.2") for name in needs)
    return Release(wheel=wheel, version=Version(version), tag=f"{wheel}-v{version}", dependencies=dependencies)


RELEASES = [
    release("mcore-ckpt"),
    release("mcore-moe", "mcore-parallel"),
    release("mcore-moe", "mcore-parallel", version="0.1.1"),
    release("mcore-inference", "mcore-parallel"),
    release("mcore-rl", "mcore-inference"),
    release("megatron-fsdp"),
]


def test_only_dependents_of_what_changed_are_run():
    def run(*changed: str, only: tuple[str, ...] = ()) -> list[str]:
        return [one.tag for one in concerned(RELEASES, set(changed), only)]

    assert run("mcore-ckpt", "megatron-fsdp") == []
    assert run("mcore-inference") == ["mcore-rl-v0.1.0"]
    assert run("mcore-parallel") == ["mcore-moe-v0.1.0", "mcore-moe-v0.1.1", "mcore-inference-v0.1.0", "mcore-rl-v0.1.0"]
    assert run("mcore-parallel", only=("mcore-moe",)) == ["mcore-moe-v0.1.0", "mcore-moe-v0.1.1"]


def test_what_failed_is_read_from_the_summary_so_that_it_can_be_run_again_alone():
    output = """x
FAILED packages/a/tests/test_x.py::test_one[a-b] - TimeoutError: ranks [1]
ERROR packages/a/tests/test_y.py::test_two
1 failed"""
    assert failures(output) == ["packages/a/tests/test_x.py::test_one[a-b]", "packages/a/tests/test_y.py::test_two"]


def test_a_release_admits_what_its_range_says():
    release = Release(
        wheel="mcore-moe", version=Version("0.1.0"), tag="mcore-moe-v0.1.0", dependencies=(Requirement("mcore-parallel>=0.1,<0.2"),)
    )
    assert release.admits("mcore-parallel", Version("0.1.9"))
    assert not release.admits("mcore-parallel", Version("0.2.0"))
    assert release.admits("mcore-ckpt", Version("7.0"))
