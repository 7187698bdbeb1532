# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Start this before a long run: every group of the plan exchanges one number, so a wrong network shows in seconds.

torchrun --nproc-per-node 8 check_world.py --tp 2 --pp 2
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mcore_parallel import ParallelPlan, ProcessGroups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for axis in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    degrees = vars(parser.parse_args())

    # torchrun tells each process who it is; an application reads that, the library does not.
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=2))
    try:
        plan = ParallelPlan.for_world(dist.get_world_size(), **degrees)
        groups = ProcessGroups.build(plan)
        for name in ("world", "tp", "cp", "dp", "pp", "ep", "expt_dp"):
            group = getattr(groups, name)
            if group.pg is None:
                continue
            start = time.perf_counter()
            total = torch.tensor(float(dist.get_rank()), device=device)
            dist.all_reduce(total, group=group.pg)
            assert total.item() == sum(group.ranks), f"rank {dist.get_rank()}: group {name} {group.ranks} added up to {total.item()}"
            if dist.get_rank() == 0:
                print(f"{name:8} {group.size:4} ranks, first exchange {time.perf_counter() - start:.2f} s")
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"all {plan.world_size} ranks of {plan} exchange")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
