# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pretraining refuses ranks that were started differently, before anything is read or allocated."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist


@pytest.mark.journey
def test_a_rank_with_another_learning_rate_is_named_on_every_rank() -> None:
    # As torchrun does, the store is kept outside of the ranks.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [
        sys.executable,
        "-m",
        "mcore_tools.train",
        "--recipe",
        "gpt_tiny",
        "--set",
        "data.prefix=none",
        "--set",
        "data.tokenizer=none",
    ]
    ranks = [
        subprocess.Popen(
            [*command, "--set", f"optimizer.lr={lr}"], env=os.environ | world | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank, lr in enumerate((0.001, 0.002))
    ]
    for process in ranks:
        _, error = process.communicate(timeout=100)
        assert process.returncode == 1
        assert "run.optimizer.lr: 0.001 on rank 0, 0.002 on rank 1" in error
        assert "Traceback" not in error
