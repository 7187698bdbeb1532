# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The corpus of a run: that there is one, its tokenizer, its samples, and their batches."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.data import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    GPTFIMDataset,
    GPTFIMDatasetConfig,
    MaskedTokensDataset,
    PretrainingSampler,
    SFTDataset,
    SFTDatasetConfig,
    SpanCorruptionDataset,
    Tokenizer,
    batches,
)
from mcore_parallel.training import Batch, BatchSizeSchedule, real_tokens, samples_after
from mcore_tools.assembly._refused import removed_if_refused
from mcore_tools.assembly._tokenizer import has_files
from mcore_tools.recipes import RunConfig

Samples = GPTDataset | MaskedTokensDataset | SpanCorruptionDataset | SFTDataset
_ENCODED = ("encoder_tokens", "encoder_mask", "attention_mask")


def check_data(config: RunConfig, owner: str = "") -> None:
    """Refuse a run without a corpus; ``owner`` stands before its fields where another config holds it."""
    if config.rl:
        raise ValueError(f"{owner}rl is set, which learns from rewards; start the run with `mcore rl`, or set {owner}rl=none")
    for name, value in (("prefix", config.data.corpora), ("tokenizer", config.data.tokenizer)):
        if not value:
            raise ValueError(f"{owner}data.{name} is empty; make the corpus with mcore-preprocess and pass --set {owner}data.{name}=PATH")
    data = config.data
    named = [("blend" if data.blend else "prefix", prefix) for prefix in data.corpora]
    named += [("eval_prefix", data.eval_prefix)] if data.eval_prefix else []
    for name, prefix in named:
        if "://" not in prefix and not Path(f"{prefix}.idx").is_file():
            raise ValueError(f"{owner}data.{name}={prefix!r}: there is no {prefix}.idx; give the --output-prefix of mcore-preprocess")
    if has_files(data.tokenizer) and not Path(data.tokenizer).exists():
        raise ValueError(f"{owner}data.tokenizer={data.tokenizer!r} is neither a file nor a folder; give a tokenizer.json, or its folder")


def validation_batches(config: RunConfig, dataset: Samples, groups: ProcessGroups, device: torch.device) -> list[Batch]:
    """The micro-batches of one evaluation."""
    stream = step_batches(config, dataset, groups, device)
    return [batch for _, step in zip(range(config.train.eval_batches), stream, strict=False) for batch in step]


def datasets(config: RunConfig, tokenizer: Tokenizer) -> tuple[Samples, Samples]:
    """Training and validation samples.

    Raises:
        ValueError: ``data.split`` leaves one of them without a document.
    """
    train = config.train
    evaluations = 1 + (train.steps // train.eval_interval if train.eval_interval else 0)
    sizes = [samples_after(train.batch_sizes(), train.steps), evaluations * train.eval_batches * train.global_batch_size, 0]
    # One rank checks the indices; where they are damaged its error ends the run.
    first = not dist.is_initialized() or dist.get_rank() == 0
    kind = SFTDataset if config.sft else GPTFIMDataset if config.data.fim else GPTDataset
    builder = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, _cut(config, tokenizer), is_verified_on_rank=lambda: first)
    with removed_if_refused(config.output):
        train_set, valid_set, _ = builder.build()
        for name, dataset in (("training", train_set), ("validation", valid_set)):
            if dataset is None:
                raise ValueError(
                    f"data.split={config.data.split!r} leaves no document of {', '.join(config.data.corpora)} for {name}; "
                    "give it a larger share, or the corpus more documents: a file of text is one, a line of JSON lines is one"
                )
        if config.sft is not None:
            return train_set, valid_set
        return _hidden(config, tokenizer, train_set, train.seed), _hidden(config, tokenizer, valid_set, train.seed + 1)


def _cut(config: RunConfig, tokenizer: Tokenizer) -> GPTDatasetConfig | SFTDatasetConfig:
    """How corpora become samples."""
    data, train = config.data, config.train
    shared: dict[str, Any] = {
        "random_seed": train.seed,
        "sequence_length": train.seq_len,
        "tokenizer": tokenizer,
        "path_to_cache": str(Path(config.output) / "index_cache"),
    }
    blend = (list(data.corpora), list(data.blend_weights) or None)
    if data.eval_prefix:
        shared["blend_per_split"] = [blend, ([data.eval_prefix], None), None]
    else:
        shared |= {"blend": blend, "split": data.split}
    if config.sft is not None:
        return SFTDatasetConfig(**shared, sequence_multiple=config.sequence_multiple)
    shared |= {"inter_document_masking": data.inter_document_masking, "eod_mask_loss": data.eod_mask_loss}
    if data.fim is None:
        return GPTDatasetConfig(**shared)
    fim = data.fim
    roles = {"prefix": fim.prefix_token, "middle": fim.middle_token, "suffix": fim.suffix_token, "pad": fim.pad_token}
    given = {role: token for role, token in roles.items() if token}
    fragments = {
        "fim_split_sample": fim.split_sample or None,
        "fim_fragment_rate": fim.fragment_rate,
        "fim_no_prefix": fim.no_prefix or None,
    }
    return GPTFIMDatasetConfig(**shared, **fragments, fim_rate=fim.rate, fim_spm_rate=fim.spm_rate, fim_extra_tokens=given)


def _hidden(config: RunConfig, tokenizer: Tokenizer, samples: GPTDataset, seed: int) -> Samples:
    """Samples as the run trains on them."""
    special = [token for token in (tokenizer.eod, tokenizer.bos, tokenizer.pad) if token is not None]
    if (spans := config.spans) is not None:
        if (least := min(*spans.sentinels, spans.bos_token, spans.eos_token)) < tokenizer.vocab_size:
            raise ValueError(
                f"spans has token {least}, which is one of text among the {tokenizer.vocab_size} of {config.data.tokenizer}; set "
                f"spans.sentinels, spans.bos_token and spans.eos_token to {tokenizer.vocab_size} or more, below model.vocab_size"
            )
        return SpanCorruptionDataset(samples, spans, vocab_size=tokenizer.vocab_size, seed=seed, special_tokens=special)
    if config.masked is None:
        return samples
    if (mask := config.masked.mask_token) in range(tokenizer.vocab_size) and mask != tokenizer.special_tokens_dict.get("mask"):
        raise ValueError(
            f"masked.mask_token={mask} is a token of text among the {tokenizer.vocab_size} of {config.data.tokenizer}; "
            f"set it to {tokenizer.vocab_size} or more, below model.vocab_size"
        )
    return MaskedTokensDataset(samples, config.masked, vocab_size=tokenizer.vocab_size, seed=seed, special_tokens=special)


def step_batches(
    config: RunConfig,
    dataset: Samples,
    groups: ProcessGroups,
    device: torch.device | str,
    consumed: int = 0,
    sizes: BatchSizeSchedule | None = None,
) -> Iterator[list[Batch]]:
    """The micro-batches of this rank, one list an optimizer step, from sample ``consumed`` on.

    Args:
        config: the run.
        dataset: of all replicas.
        groups: the layout.
        device: of the batches.
        consumed: samples that the steps before took.
        sizes: sequences of each step; None for ``global_batch_size``.
    """
    train = config.train
    stride = train.micro_batch_size * groups.dp.size
    stream = batches(dataset, PretrainingSampler(len(dataset), consumed, train.micro_batch_size, groups.dp.rank, groups.dp.size, stride))
    while True:
        size = train.global_batch_size if sizes is None else sizes.size(consumed)
        micro = [sample for _, sample in zip(range(size // stride), stream, strict=False)]
        if len(micro) < size // stride:
            return
        consumed += size
        yield [_batch(sample, device, padded=config.moe is not None) for sample in micro]


def _batch(sample: Mapping[str, Tensor], device: torch.device | str, *, padded: bool = False) -> Batch:
    """With ``padded``, ends of rows that no loss depends on are marked, for layers that skip them."""
    valid = real_tokens(sample["loss_mask"]) if padded else None

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    # Bounds stay on the host; attention and positions stay within each conversation.
    cu_seqlens = sample.get("cu_seqlens")
    return Batch(
        tokens=sample["tokens"].to(device, non_blocking=True),
        labels=sample["labels"].to(device, non_blocking=True),
        loss_mask=sample["loss_mask"].to(device, non_blocking=True),
        positions=None if cu_seqlens is None else moved(sample["position_ids"]),
        cu_seqlens=cu_seqlens,
        valid=moved(valid),
        extras={name: sample[name].to(device, non_blocking=True) for name in _ENCODED} if "encoder_tokens" in sample else {},
    )
