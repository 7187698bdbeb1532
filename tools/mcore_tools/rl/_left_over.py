# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a run that was killed leaves beside the checkpoints of its policy."""

import shutil

from mcore_ckpt import CheckpointManager
from mcore_parallel import ProcessGroups


def forget_after(checkpoints: CheckpointManager, step: int, groups: ProcessGroups) -> None:
    """Remove what was saved for steps of the policy that never came: after ``step`` other answers follow now."""
    if groups.world.is_first:
        for left in [left for left in checkpoints.steps() if left > step]:
            shutil.rmtree(checkpoints.path(left))
