# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A rank that is killed under training is named by those that are left, soon, in every layout."""

import gc
import json
import os
import re
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_tools import train
from mcore_tools.assembly import _data
from tests.support.corpora import write_corpus
from tests.support.world import _server

LAYOUTS = {
    "tp": ["plan.tp=2"],
    "pp": ["plan.pp=2"],
    "dp": ["plan.dp=2"],
    "distributed optimizer": ["plan.dp=2", "optimizer.use_distributed_optimizer=true"],
    "fsdp": ["plan.dp=2", "data_parallel=fsdp"],
    "restart": ["plan.dp=2", "restart.max_restarts=1"],
}


def drive(changes: list[str], folder: Path, kind: str) -> None:
    """Train in each layout on two ranks of which one is killed; forked here, they share the imports."""
    # Ranks collect garbage when they end: not what was loaded before.
    gc.freeze()
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        # As torchrun does, the store is kept outside of the ranks.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        run = folder / str(number)
        run.mkdir()
        ranks = [os.fork() or rank_main([*changes, *layout, f"output={run}/run"], rank, store.port, run) for rank in range(2)]
        statuses, deadline = {}, time.monotonic() + 60
        while len(statuses) < 2 and time.monotonic() < deadline:
            for pid in set(ranks) - set(statuses):
                ended_pid, status = os.waitpid(pid, os.WNOHANG)
                if ended_pid:
                    statuses[pid] = os.waitstatus_to_exitcode(status), time.time()
            time.sleep(0.02)
        for pid in set(ranks) - set(statuses):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        killed_at = float((run / "killed_at").read_text()) if (run / "killed_at").exists() else 0.0
        result = {"name": name, "statuses": [statuses.get(pid, (None, 0.0))[0] for pid in ranks]}
        result["seconds"] = statuses.get(ranks[0], (None, time.time()))[1] - killed_at
        (folder / f"{number}.json").write_text(json.dumps(result | {"error": (run / "error0").read_text()}))


def rank_main(changes: list[str], rank: int, port: int, run: Path) -> int:
    """One rank; never returns."""
    code = 1
    with (run / f"error{rank}").open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ["LOCAL_RANK"] = str(rank)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        original = _data.step_batches

        def killed(*arguments: Any) -> Any:
            for number, batches in enumerate(original(*arguments)):
                if rank == 1 and number == 1:
                    (run / "killed_at").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batches

        _data.step_batches = killed
        sys.argv = ["pretrain", "--recipe", "gpt_tiny", *(word for change in changes for word in ("--set", change))]
        code = train.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def killed_in_each(changes: list[str], folder: Path, kind: str) -> dict[str, float]:
    """Layout -> seconds from the death to the end of the rank that is left, which names the dead one."""
    write_corpus(folder, "to be or not to be, that is the question. ")
    changes = [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", "train.seq_len=16"),
        *(
            "train.micro_batch_size=1",
            "train.global_batch_size=2",
            "train.steps=50",
            "train.eval_interval=0",
            "train.checkpoint_interval=0",
        ),
        *("train.warmup_steps=0", "log.tensorboard=false", "log.html=false", *changes),
    ]
    driver = _server.Process(target=drive, args=(changes, folder, kind))
    driver.start()
    driver.join(400)
    driver.kill()
    results = [json.loads((folder / f"{number}.json").read_text()) for number in range(len(LAYOUTS))]
    for result in results:
        assert result["statuses"][1] == -signal.SIGKILL and result["statuses"][0] in (1, 75), result
        assert re.search("rank 1[:,] dead, its process is gone", result["error"]), result
    return {result["name"]: result["seconds"] for result in results}


@pytest.mark.journey
@pytest.mark.timeout(450)
def test_a_killed_rank_is_named_within_seconds_in_every_layout(tmp_path: Path) -> None:
    small = ["model.num_layers=2", "model.hidden_size=16", "model.ffn_hidden_size=16"]
    seconds = killed_in_each(small, tmp_path, "cpu")
    # About 1.5 on a quiet machine; a collective that waits for the dead rank takes a minute.
    assert max(seconds.values()) < 40 and statistics.median(seconds.values()) < 15, seconds


@pytest.mark.gpu
@pytest.mark.timeout(450)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_killed_under_kernels_that_wait_for_it_is_named(tmp_path: Path) -> None:
    seconds = killed_in_each([], tmp_path, "cuda")
    assert max(seconds.values()) < 10, seconds
