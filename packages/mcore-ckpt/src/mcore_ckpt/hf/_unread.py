# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Entries of config.json that no codec reads: refused by name, unless they are known to change no numbers."""

from collections.abc import Collection
from typing import Any, NoReturn

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt.hf._fields import Config, Family

__all__ = ["check_entries"]

_INERT = frozenset(
    (
        # Who wrote the file, for which class, and how it is stored or run.
        *("architectures", "auto_map", "dtype", "model_type", "name_or_path", "torch_dtype", "torchscript", "transformers_version"),
        *("attn_implementation", "cache_implementation", "chunk_size_feed_forward", "gradient_checkpointing", "output_attentions"),
        *("output_hidden_states", "problem_type", "quantization_config", "return_dict", "tokenizer_class", "unsloth_version", "use_cache"),
        *("id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "pretraining_tp", "num_logits_to_keep"),
        # Token ids and lengths, which an import keeps beside the model.
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id"),
        *("max_position_embeddings", "is_decoder", "is_encoder_decoder"),
        # Terms of a loss, which are a run's choice here.
        *("aux_loss_alpha", "output_router_logits", "router_aux_loss_coef", "seq_aux", "z_loss_coefficient"),
    )
)
"""Entries of any family that say nothing about its numbers."""
_WITHOUT = "no model has dropout here: set it to 0.0, or import with ignore=NAME to train without"


def check_entries(config: Config, family: Family, ignore: Collection[str]) -> None:
    """Every entry is read, has the one value that the family describes, or changes nothing.

    Args:
        config: of config.json.
        ignore: entries to pass over: dropout, and those that no codec reads.

    Raises:
        CheckpointingException: names an entry and its value.
        ValueError: ``ignore`` names an entry that the weights depend on.
    """
    read = {name for codec in family.codecs for name in codec.theirs}
    for name in ignore:
        if name in read or (name in family.fixed and not _is_dropout(name)):
            raise ValueError(f"ignore={name!r}: family {family.name} reads it; change it in config.json")
    for name, only in family.fixed.items():
        value = config.get(name, family.silent.get(name, only))
        if name not in ignore and not _same(value, only):
            where = "" if name in config else ", which it means to leave it out,"
            _refuse(f"{name}={value!r}{where} is not supported for {family.name}; {_WITHOUT if _is_dropout(name) else f'only {only!r} is'}")
    known = read | family.fixed.keys() | family.inert | _INERT | set(ignore)
    for name, value in config.items():
        if name in known or name.startswith("_") or value is None:
            continue
        if not _is_dropout(name):
            _refuse(f"{name}={value!r} is not known for {family.name}; import with ignore={name} if it changes nothing")
        if not _same(value, 0.0):
            _refuse(f"{name}={value!r} is not supported for {family.name}; {_WITHOUT}")


def _refuse(what: str) -> NoReturn:
    raise CheckpointingException(f"config.json: {what}")


def _same(value: Any, only: Any) -> bool:
    """Null stands for whatever is off."""
    return value == only or (value is None and not only)


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")
