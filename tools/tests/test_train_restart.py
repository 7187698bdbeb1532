# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run whose rank fails goes on in the same processes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_tools import train
from mcore_tools.assembly import _data
from mcore_tools.recipes import RecipeError, override, recipe
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus

STORES: list[dist.Store] = []


def corpus(folder: Path) -> list[str]:
    """Changes of gpt_tiny that make it tiny, on two ranks."""
    write_corpus(folder, "to be or not to be, that is the question. ")
    return [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", f"output={folder}/run"),
        *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=16", "train.seq_len=16", "train.micro_batch_size=1"),
        *("train.global_batch_size=2", "train.steps=5", "train.eval_batches=1", "train.eval_interval=0", "train.checkpoint_interval=2"),
        *("train.warmup_steps=0", "log.tensorboard=false", "log.html=false", "plan.dp=2"),
    ]


def fail_once(changes: list[str]) -> None:
    rank, port = dist.get_rank(), [0]
    if rank == 0:
        STORES.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        port = [STORES[0].port]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    # As torchrun does, the store is kept outside of the world that is made over it.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    original, attempts = _data.step_batches, []

    def breaks(config: Any, dataset: Any, groups: Any, device: Any, consumed: int = 0, sizes: Any = None) -> Any:
        if sizes is not None:
            attempts.append(consumed)
        for number, batches in enumerate(original(config, dataset, groups, device, consumed, sizes)):
            if rank == 1 and attempts == [0] and number == 3:
                raise OSError("the file system is gone")
            yield batches

    _data.step_batches = breaks
    trained = train.pretrain(override(recipe("gpt_tiny"), [*changes, "restart.max_restarts=1", "restart.timeout_s=30"]))
    assert attempts == [0, 4], "the second attempt reads on behind the checkpoint of step 2"
    assert trained.validation_loss > 0


@pytest.mark.world(2)
def test_a_rank_that_fails_once_costs_a_restart_from_the_newest_checkpoint(world, tmp_path: Path) -> None:
    world(fail_once, changes=corpus(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5]
    assert rows[2]["loss"] == rows[3]["loss"], "the step that is done twice gives the same bits"
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [f"step_{n:08d}" for n in (2, 4, 5)]


def test_without_a_gpu_graphs_say_so_and_the_run_is_as_ever(tmp_path: Path) -> None:
    changes = [*corpus(tmp_path), "plan.dp=1", "train.steps=2", "train.checkpoint_interval=0"]
    plain = train_rank(override(recipe("gpt_tiny"), changes), "cpu")
    graphed = train_rank(override(recipe("gpt_tiny"), [*changes, "cuda_graphs=[layers.*]", f"output={tmp_path}/graphed"]), "cpu")
    assert plain.remarks == () and plain.validation_loss == graphed.validation_loss
    (remark,) = graphed.remarks
    assert remark.startswith("cuda graphs: 0 captured, 0 replays, 0 MiB; eager calls: ") and "there is no CUDA device" in remark


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["dumps.every=5", "cuda_graphs=[layers.*]"], "dumps.every=5 looks at the tensors of whole modules"),
        (["dumps.every=5", "optimizer.use_distributed_optimizer=true"], "set dumps.gradients=false or"),
        (["dumps.every=5", "plan.cp=2"], "dumps.every=5 needs plan.cp=1"),
        (["cuda_graphs=[layers.*]", "cuda_graph.external_cuda_graph=true", "plan.pp=2"], r"plan.pp=2 stages wait for each other; set"),
        (["cuda_graphs=[layers.*]", "data_parallel=fsdp"], r"no graph replays; set cuda_graphs=\[\]"),
        (["profile.tool=perf"], "profile.tool='perf' is not of type"),
        (["profile.step_start=4", "profile.step_end=4"], "hold no step"),
        (["log.timers_interval=-1"], "timers_interval=-1 must not be negative"),
        (["restart.max_restarts=-1"], "max_restarts=-1 must not be negative"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(change: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe("gpt_tiny"), change)
