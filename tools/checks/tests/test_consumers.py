# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which release is compared, and when a failure of it counts."""

from packaging.requirements import Requirement
from packaging.version import Version

from tools.checks.consumers import Release, newest_tag


def test_the_highest_version_wins_not_the_last_name():
    tags = ["mcore-moe-v0.2.0", "mcore-moe-v0.10.0", "mcore-parallel-v9.0.0", "mcore-moe-v0.9.0", "nightly"]
    assert newest_tag("mcore-moe", tags) == "mcore-moe-v0.10.0"
    assert newest_tag("mcore-rl", tags) is None


def test_a_release_admits_what_its_range_says():
    release = Release(
        wheel="mcore-moe", version=Version("0.1.0"), tag="mcore-moe-v0.1.0", dependencies=(Requirement("mcore-parallel>=0.1,<0.2"),)
    )
    assert release.admits("mcore-parallel", Version("0.1.9"))
    assert not release.admits("mcore-parallel", Version("0.2.0"))
    assert release.admits("mcore-ckpt", Version("7.0"))
