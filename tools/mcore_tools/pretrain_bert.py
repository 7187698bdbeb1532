# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Train a BERT on hidden tokens, on one machine or many; everything else is as of ``mcore train``.

torchrun --nproc-per-node 4 -m mcore_tools.pretrain_bert --set plan.pp=2 --set plan.vpp=2 --set plan.dp=2 \\
    --set data.prefix=corpus --set data.tokenizer=tokenizer.json
"""

import sys

from mcore_tools.recipes import RunConfig
from mcore_tools.train import main


def check(config: RunConfig) -> RunConfig:
    """That the run trains on hidden tokens.

    Raises:
        ValueError: it predicts next tokens.
    """
    if config.masked is None:
        raise ValueError("the recipe has masked=none and so predicts next tokens; use bert_tiny or one like it, or `mcore train`")
    return config


if __name__ == "__main__":
    sys.exit(main(prog="python -m mcore_tools.pretrain_bert", default_recipe="bert_tiny", check=check))
