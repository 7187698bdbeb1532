# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From a configuration to data, and to what trains."""

import dataclasses
from pathlib import Path

import pytest

from mcore_parallel.data import ByteTokenizer, preprocess
from mcore_parallel.data_parallel import DistributedDataParallel
from mcore_tools.assembly import assemble, datasets
from mcore_tools.recipes import DataConfig, recipe


def test_a_split_that_leaves_no_document_names_what_goes_without(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    (tmp_path / "text.txt").write_text("a few words that make one document", encoding="ascii")
    preprocess([tmp_path / "text.txt"], str(tmp_path / "corpus"), tokenizer, append_eod=True)
    data = DataConfig(prefix=str(tmp_path / "corpus"), split="95,5,0")
    config = dataclasses.replace(recipe("gpt_tiny"), data=data, output=str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.split='95,5,0' leaves no document .* for validation"):
        datasets(config, tokenizer)


@pytest.mark.parametrize("slices", [True, False])
def test_runs_fuse_and_overlap_without_being_told(slices: bool) -> None:
    tiny = recipe("gpt_tiny")
    parts = assemble(dataclasses.replace(tiny, optimizer=dataclasses.replace(tiny.optimizer, use_distributed_optimizer=slices)), "cpu")
    assert isinstance(parts.sync, DistributedDataParallel)
    assert parts.sync.config.gradient_accumulation_fusion and parts.sync.config.overlap_grad_reduce
    assert parts.sync.config.overlap_param_gather == slices
    parts.close()
