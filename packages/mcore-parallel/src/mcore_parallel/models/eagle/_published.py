# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A head under the names and shapes in which EAGLE-3 heads are published."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.comm import all_gather
from mcore_parallel.groups import named_shards
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models.eagle._config import EagleConfig
from mcore_parallel.models.eagle._head import EagleHead
from mcore_parallel.models.eagle._vocabulary import DraftVocabulary
from mcore_parallel.nn import Llama3Scaling

_PLAIN: Mapping[str, str] = {
    "fusion.weight": "fc.weight",
    "final_norm.weight": "norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_OF_LAYER: Mapping[str, str] = {
    "embedding_norm.weight": "input_layernorm.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "input_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_FIRST = "midlayer"


def published_weights(head: EagleHead) -> dict[str, Tensor]:
    """Whole tensors by their published names, on the CPU, the same on every tp rank, which all call it.

    ``fc``, ``midlayer`` (further layers are ``layers.1`` and so on), ``norm``, ``lm_head``, and with a vocabulary ``d2t`` (int64, added
    to a token's number) and ``t2d`` (bool). The embedding, which is the target's, is left out.

    Raises:
        ValueError: parameters that have no published name.
    """
    _check(head)
    weights: dict[str, Tensor] = {}
    for shard in named_shards(head):
        whole = shard.parameter.detach()
        if "tp" in shard.spec.shards and head.groups.tp.size > 1:
            whole = all_gather(whole.contiguous(), head.groups.tp, shard.spec.shards["tp"])
        for name, view in _parts(head, shard.name, whole):
            weights[name] = view.to("cpu").reshape(_shape(view)).clone(memory_format=torch.contiguous_format)
    if head.vocabulary is not None:
        weights |= {"d2t": head.vocabulary.d2t, "t2d": head.vocabulary.t2d}
    return weights


def load_published(head: EagleHead, weights: Mapping[str, Tensor]) -> None:
    """Fill a head from whole tensors by their published names; ``layers.0`` is understood as ``midlayer``, an embedding is passed over.

    Args:
        head: with the vocabulary of ``published_vocabulary``.
        weights: as of ``published_weights``.

    Raises:
        ValueError: tensors that are missing, too many or of other shapes, another draft vocabulary; the head is as it was then.
    """
    _check(head)
    published = {name.replace("layers.0.", f"{_FIRST}.", 1) if name.startswith("layers.0.") else name: x for name, x in weights.items()}
    published = {name: x for name, x in published.items() if name != "t2d" and not name.startswith("embed_tokens.")}
    table = published.pop("d2t", None)
    if head.vocabulary is not None and (table is None or not torch.equal(table.cpu(), head.vocabulary.d2t)):
        raise ValueError("d2t is not that of the head's vocabulary; make the head with published_vocabulary(weights)")
    pieces = []
    for shard in named_shards(head):
        whole = torch.empty(shard.spec.shape, dtype=shard.parameter.dtype)
        pieces.append((shard, whole, list(_parts(head, shard.name, whole))))
    wanted = {name: _shape(view) for _, _, parts in pieces for name, view in parts}
    shapes = {name: tuple(x.shape) for name, x in published.items()}
    if wrong := {name for name in wanted.keys() | shapes.keys() if name not in shapes or wanted.get(name) != shapes[name]}:
        misfits = {name: shapes.get(name) for name in sorted(wrong)[:4]}
        raise ValueError(f"the head has no place for, or lacks, {misfits}; build it with the architecture that the weights were made for")
    with torch.no_grad():
        for shard, whole, parts in pieces:
            for name, view in parts:
                view.copy_(published[name].reshape(view.shape))
            shard.parameter.copy_(whole[shard.spec.slices(head.groups)])


def published_vocabulary(weights: Mapping[str, Tensor], vocab_size: int) -> DraftVocabulary | None:
    """The draft vocabulary of published weights; None where there is none.

    Args:
        weights: with ``d2t``, or without.
        vocab_size: of the target.
    """
    table = weights.get("d2t")
    return None if table is None else DraftVocabulary(table.cpu() + torch.arange(len(table)), vocab_size)


def published_config(config: EagleConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """What stands in the ``config.json`` beside the weights.

    Args:
        config: the architecture.
        dtype: of the weights.

    Raises:
        ValueError: modules of the target that are no layers, positions or norms that the format does not know.
    """
    sizes = config.transformer
    numbers = [name.removeprefix("layers.") for name in config.aux_modules]
    if not all(number.isdigit() for number in numbers):
        raise ValueError(f"aux_modules={config.aux_modules} must be layers of the target; name them layers.N")
    if sizes.position_embedding_type != "rope" or sizes.rotary_percent != 1.0 or sizes.rotary_interleaved:
        raise ValueError("published heads turn all channels by halves: set position_embedding_type='rope', rotary_percent=1.0")
    if sizes.qk_layernorm_across_heads:
        raise ValueError("qk_layernorm_across_heads=True has no name in published heads; set it to False, which normalises each head")
    scaling = sizes.rope_scaling
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_theta": sizes.rotary_base,
        "rope_scaling": None if scaling is None else _scaling(scaling),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or sizes.vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [int(number) for number in numbers],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
        },
    }


def published_architecture(description: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EagleConfig:
    """The architecture of a published head: the inverse of ``published_config``.

    Args:
        description: what stands in its ``config.json``.
        weights: as of ``published_weights``; they say whether heads of attention are normalised.

    Raises:
        ValueError: a field is missing, or one says what heads of this wheel do not have.
    """
    try:
        layers, scaling = description["eagle_config"]["eagle_aux_hidden_state_layer_ids"], description.get("rope_scaling")
        if scaling is not None and scaling.get("rope_type") != "llama3":
            raise ValueError(f"rope_scaling={scaling!r} must be of rope_type 'llama3', or none")
        wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
        if wrong := {name: description.get(name, value) for name, value in wanted.items() if description.get(name, value) != value}:
            raise ValueError(f"a head has {wanted}, found {wrong}")
        size, vocab_size = description["draft_vocab_size"], description["vocab_size"]
        transformer = TransformerConfig(
            num_layers=description["num_hidden_layers"],
            hidden_size=description["hidden_size"],
            ffn_hidden_size=description["intermediate_size"],
            num_attention_heads=description["num_attention_heads"],
            num_query_groups=description["num_key_value_heads"],
            kv_channels=description["head_dim"],
            vocab_size=vocab_size,
            normalization="RMSNorm",
            norm_epsilon=description["rms_norm_eps"],
            activation="swiglu",
            rotary_base=description["rope_theta"],
            rope_scaling=None
            if scaling is None
            else Llama3Scaling(**{name: scaling[name] for name in _scaling(Llama3Scaling()) if name != "rope_type"}),
            qk_layernorm=any(name.endswith(".self_attn.q_norm.weight") for name in weights),
        )
    except KeyError as error:
        raise ValueError(f"the description of a head has no {error}; export it with save_published, or add the field") from None
    modules = tuple(f"layers.{layer}" for layer in layers)
    return EagleConfig(transformer=transformer, aux_modules=modules, draft_vocab_size=size if "d2t" in weights else None)


def _shape(view: Tensor) -> tuple[int, ...]:
    """As published: a vector, or a matrix whose rows are those of all heads."""
    return tuple(view.shape) if view.dim() < 3 else (view.numel() // view.shape[-1], view.shape[-1])


def save_published(head: EagleHead, folder: str | Path) -> None:
    """Write ``model.safetensors`` and ``config.json`` into a new folder, which appears when it is complete; needs the extra ``eagle``.

    Every tp rank calls it; the first rank of the world writes.

    Args:
        head: whose weights they are.
        folder: does not exist.

    Raises:
        FileExistsError: it does.
        ImportError: the extra is not installed.
        ValueError: a head that cannot be published so.
    """
    description, weights = published_config(head.architecture, dtype=head.dtype), published_weights(head)
    if not head.groups.world.is_first:
        return
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; give another folder, or remove it")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _safetensors().save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder)


def read_published(folder: str | Path) -> dict[str, Tensor]:
    """Weights of a folder that ``save_published``, or another trainer of such heads, wrote; needs the extra ``eagle``.

    Raises:
        OSError: there is no ``model.safetensors``.
        ImportError: the extra is not installed.
    """
    return _safetensors().load_file(Path(folder) / "model.safetensors")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("published heads need safetensors; install mcore-parallel[eagle]") from None
    return safetensors.torch


def _scaling(scaling: Llama3Scaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


def _check(head: EagleHead) -> None:
    config = head.config
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma or config.activation != "swiglu":
        raise ValueError(
            f"normalization={config.normalization!r} and activation={config.activation!r} are none of published heads; "
            'they have "RMSNorm" (not zero-centred) and "swiglu"'
        )
    if config.add_bias_linear or config.add_qkv_bias or config.attention_output_gate:
        raise ValueError("biases and output gates have no published names; set add_bias_linear, add_qkv_bias, attention_output_gate=False")


def _parts(head: EagleHead, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Published names of a parameter, each with its view of the whole tensor."""
    if name in _PLAIN:
        yield _PLAIN[name], whole
        return
    _, number, rest = name.split(".", 2)
    prefix = _FIRST if number == "0" else f"layers.{number}"
    if rest in _OF_LAYER:
        yield f"{prefix}.{_OF_LAYER[rest]}", whole
    elif rest == "mlp.up.weight":
        yield from ((f"{prefix}.mlp.{kind}_proj.weight", part) for kind, part in zip(("gate", "up"), whole, strict=True))
    else:
        assert rest == "attention.qkv.weight", name
        # [K, (A / K + 2) d, columns]: of each key-value head its queries, its key, its value.
        rows = whole.view(head.config.kv_heads, -1, head.config.head_dim, whole.shape[-1])
        for kind, part in (("q", rows[:, :-2]), ("k", rows[:, -2:-1]), ("v", rows[:, -1:])):
            yield f"{prefix}.self_attn.{kind}_proj.weight", part
