# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mixtures of experts in config.json and in files: their counts and widths, which layers have them, how a router weighs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_ckpt.hf._fields import Codec, Config, refuse, renamed, same
from mcore_ckpt.hf._rules import Dim, Form, HFPart, PartLayout, WeightRule

__all__ = [
    "DEEPSEEK_ROUTER",
    "NEMOTRON_ROUTER",
    "PACKED_EXPERTS",
    "expert_bias",
    "expert_count",
    "experts",
    "experts_by_list",
    "experts_by_pattern",
    "experts_from",
    "has_routed_layers",
    "pattern_has_experts",
    "shared_rules",
    "shared_width",
    "sigmoid_router",
    "softmax_router",
    "ungated_experts",
]

_LAYER = "model.layers.{layer}."
_MLP = "layers.{layer}.mlp."
_GATES = ("gate", "up")
_SHARED = "moe_shared_expert_intermediate_size"


def experts(router: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Files hold one tensor an expert; the second forms are what the modules of newer transformers hold in memory."""
    in_memory = _LAYER + "mlp.experts."
    return (
        WeightRule(
            _MLP + "router.weight",
            ("E", "D"),
            (Form((HFPart(router, ("E", "D")),)), Form((HFPart(_LAYER + "mlp.gate.weight", ("E", "D")),))),
            kinds="E",
        ),
        WeightRule(
            _MLP + "experts.up",
            ("E", 2, "X", "D"),
            (
                Form((HFPart(gate, ("X", "D")), HFPart(up, ("X", "D")))),
                Form((HFPart(in_memory + "gate_up_proj", ("E", "2X", "D")),)),
            ),
            kinds="E",
        ),
        WeightRule(
            _MLP + "experts.down",
            ("E", "D", "X"),
            (Form((HFPart(down, ("D", "X")),)), Form((HFPart(in_memory + "down_proj", ("E", "D", "X")),))),
            kinds="E",
        ),
    )


def _packed(ours: str, shape: tuple[int | str, ...], theirs: str, their_shape: tuple[int | str, ...], layout: PartLayout) -> WeightRule:
    part = HFPart(f"{_LAYER}mlp.experts.{theirs}", their_shape)
    return WeightRule(f"{_MLP}experts.{ours}", shape, (Form((part,), layout),), kinds="E")


PACKED_EXPERTS = (
    same(_MLP + "router.weight", _LAYER + "mlp.router.weight", "E", "D", kinds="E"),
    same(_MLP + "router.bias", _LAYER + "mlp.router.bias", "E", kinds="E"),
    _packed("up", ("E", 2, "X", "D"), "gate_up_proj", ("E", "D", "2X"), PartLayout.PAIRS_TRANSPOSED),
    _packed("up_bias", ("E", 2, "X"), "gate_up_proj_bias", ("E", "2X"), PartLayout.PAIRS),
    _packed("down", ("E", "D", "X"), "down_proj", ("E", "X", "D"), PartLayout.TRANSPOSED),
    _packed("down_bias", ("E", "D"), "down_proj_bias", ("E", "D"), PartLayout.STACK),
)
"""gpt-oss: inputs before outputs, and rows of gate and value in turn."""


def shared_rules(theirs: str) -> tuple[WeightRule, ...]:
    """The feed-forward that every token goes through, from the prefix of the other side's three projections."""
    when, place = _SHARED, _LAYER + theirs
    up = tuple(HFPart(f"{place}.{name}_proj.weight", ("SX", "D")) for name in _GATES)
    return (
        WeightRule(_MLP + "shared_experts.up.weight", (2, "SX", "D"), (Form(up),), when, "E"),
        same(_MLP + "shared_experts.down.weight", f"{place}.down_proj.weight", "D", "SX", when=when, kinds="E"),
        same(
            _MLP + "shared_expert_gate.weight", _LAYER + "mlp.shared_expert_gate.weight", 1, "D", when="moe_shared_expert_gate", kinds="E"
        ),
    )


def ungated_experts(theirs: str) -> tuple[WeightRule, ...]:
    """A mixture without gates in its activation, from the prefix of the other side's tensors (Nemotron-H)."""

    def each(ours: str, name: str, *shape: Dim) -> WeightRule:
        part = HFPart(f"{theirs}experts.{{expert}}.{name}.weight", shape)
        return WeightRule(f"{_MLP}experts.{ours}", ("E", *shape), (Form((part,)),), kinds="E")

    def one(ours: str, name: str, *shape: Dim, when: str = "") -> WeightRule:
        return same(f"{_MLP}{ours}.weight", f"{theirs}{name}.weight", *shape, when=when, kinds="E")

    return (
        one("router", "gate", "E", "D"),
        expert_bias(f"{theirs}gate.e_score_correction_bias"),
        each("up", "up_proj", "X", "XD"),
        each("down", "down_proj", "XD", "X"),
        one("shared_experts.up", "shared_experts.up_proj", "SX", "D", when=_SHARED),
        one("shared_experts.down", "shared_experts.down_proj", "D", "SX", when=_SHARED),
        one("latent_down", "fc1_latent_proj", "XD", "D", when="moe_latent_size"),
        one("latent_up", "fc2_latent_proj", "D", "XD", when="moe_latent_size"),
    )


def expert_bias(theirs: str) -> WeightRule:
    """The bias that the choice of experts adds to their scores."""
    return WeightRule(_MLP + "router.expert_bias", ("E",), (Form((HFPart(theirs, ("E",)),)),), kinds="E", float32=True)


def expert_count() -> Codec:
    """Newer releases call it as Mixtral does."""

    def read(config: Config) -> dict[str, Any]:
        count = config.get("num_local_experts") or config.get("num_experts")
        if count is None:
            raise ValueError("lacks num_experts")
        return {"num_moe_experts": count}

    def write(full: Config) -> dict[str, Any]:
        return dict.fromkeys(("num_experts", "num_local_experts"), full["num_moe_experts"])

    return Codec(ours=("num_moe_experts",), theirs=("num_experts", "num_local_experts"), write=write, read=read)


def softmax_router() -> Codec:
    """``norm_topk_prob``: a token's experts weigh 1 together, by a softmax over them; else, and when nothing is said, by one over all."""
    return Codec(
        ours=("moe_router_pre_softmax",),
        theirs=("norm_topk_prob",),
        write=lambda full: {"norm_topk_prob": not full["moe_router_pre_softmax"]},
        read=lambda config: {"moe_router_pre_softmax": not config.get("norm_topk_prob")},
    )


_WIDTHS = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_layer_freq")


def _flags(full: Mapping[str, Any]) -> list[int]:
    freq, layers = full["moe_layer_freq"], full["num_layers"]
    return [int(layer % freq == 0) for layer in range(layers)] if isinstance(freq, int) else list(freq)


def _widths(flags: Sequence[int], dense: int | None, expert: int) -> dict[str, Any]:
    """Where all layers have experts, their width is that of the feed-forward."""
    if all(flags):
        return {"ffn_hidden_size": expert}
    return {"ffn_hidden_size": dense, "moe_ffn_hidden_size": expert, "moe_layer_freq": tuple(flags)}


def _written_widths(full: Config) -> dict[str, Any]:
    expert = full["moe_ffn_hidden_size"] or full["ffn_hidden_size"]
    return {"intermediate_size": full["ffn_hidden_size"], "moe_intermediate_size": expert}


def experts_by_list() -> Codec:
    """Every ``decoder_sparse_step``-th layer has experts, but those of ``mlp_only_layers`` (Qwen)."""

    def write(full: Config) -> dict[str, Any]:
        dense = [layer for layer, flag in enumerate(_flags(full)) if not flag]
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1, **_written_widths(full)}

    def read(config: Config) -> dict[str, Any]:
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        flags = [int((layer + 1) % step == 0 and layer not in dense) for layer in range(config.get("num_hidden_layers") or 0)]
        if not any(flags):
            refuse("mlp_only_layers", dense, f"with decoder_sparse_step={step} leaves no layer with experts; import a dense family")
        return _widths(flags, config.get("intermediate_size"), config["moe_intermediate_size"])

    theirs = ("mlp_only_layers", "decoder_sparse_step", "intermediate_size", "moe_intermediate_size")
    return Codec(ours=_WIDTHS, theirs=theirs, write=write, read=read)


def experts_from() -> Codec:
    """The first ``first_k_dense_replace`` layers are dense, all others have experts and shared ones (DeepSeek)."""
    shared = "moe_shared_expert_intermediate_size"

    def write(full: Config) -> dict[str, Any]:
        if full["num_moe_experts"] is None:
            return {"first_k_dense_replace": full["num_layers"], "intermediate_size": full["ffn_hidden_size"]}
        flags, widths = _flags(full), _written_widths(full)
        first = flags.index(1)
        if not all(flags[first:]):
            refuse("moe_layer_freq", full["moe_layer_freq"], "has no name there: dense layers come first; use (0,) * k + (1,) * n")
        if full[shared] is None or full[shared] % widths["moe_intermediate_size"]:
            width = widths["moe_intermediate_size"]
            refuse(shared, full[shared], f"has no name there: it must be a multiple of the width of an expert, {width}")
        return {
            "first_k_dense_replace": first,
            "n_routed_experts": full["num_moe_experts"],
            "n_shared_experts": full[shared] // widths["moe_intermediate_size"],
            **widths,
        }

    def read(config: Config) -> dict[str, Any]:
        if not has_routed_layers(config):
            return {"ffn_hidden_size": config["intermediate_size"]}
        layers, dense, count = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0, config["n_routed_experts"]
        if config.get("moe_layer_freq", 1) != 1:
            refuse("moe_layer_freq", config["moe_layer_freq"], "is not supported; only 1 is")
        width = config["moe_intermediate_size"]
        numbers = {"num_moe_experts": count, shared: (config.get("n_shared_experts") or 0) * width or None}
        return numbers | _widths([0] * dense + [1] * (layers - dense), config["intermediate_size"], width)

    theirs = (
        *("first_k_dense_replace", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "intermediate_size"),
        *("moe_layer_freq", "num_hidden_layers"),
    )
    return Codec(ours=(*_WIDTHS, "num_moe_experts", shared), theirs=theirs, write=write, read=read)


def experts_by_pattern() -> Codec:
    """Layers of the pattern's E have experts of a width of their own, perhaps behind a projection, and one shared expert (Nemotron-H)."""
    names = {
        "num_moe_experts": "n_routed_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    }

    def write(full: Config) -> dict[str, Any]:
        pattern, latent = full["hybrid_layer_pattern"], full["moe_latent_size"]
        if full["num_moe_experts"] is None:
            if "E" in (pattern or ""):
                refuse("num_moe_experts", None, f"is needed for the layers E of hybrid_layer_pattern={pattern!r}")
            return {}
        if "E" not in (pattern or ""):
            refuse("hybrid_layer_pattern", pattern, f"has no E for num_moe_experts={full['num_moe_experts']}; leave that out")
        if full["moe_shared_expert_intermediate_size"] is None:
            refuse("moe_shared_expert_intermediate_size", None, "has no name there; every mixture of this family has a shared expert")
        return {theirs: full[ours] for ours, theirs in names.items()} | {"n_shared_experts": 1, "moe_latent_size": latent}

    def read(config: Config) -> dict[str, Any]:
        if not pattern_has_experts(config):
            return {}
        if config.get("n_shared_experts", 1) != 1:
            refuse("n_shared_experts", config["n_shared_experts"], "is not supported; only 1 is")
        if lacking := [theirs for theirs in names.values() if config.get(theirs) is None]:
            raise ValueError(f"lacks {', '.join(lacking)}")
        return {ours: config[theirs] for ours, theirs in names.items()} | {"moe_latent_size": config.get("moe_latent_size")}

    theirs = (*names.values(), "n_shared_experts", "moe_latent_size")
    return Codec(ours=(*names, "moe_latent_size"), theirs=theirs, write=write, read=read)


def pattern_has_experts(config: Config) -> bool:
    """Whether config.json of a hybrid names a layer with experts."""
    return bool({"moe", "E"} & {*(config.get("layers_block_type") or config.get("hybrid_override_pattern") or ())})


def has_routed_layers(config: Config) -> bool:
    """Whether config.json leaves experts in a layer behind the dense ones."""
    layers, dense = config.get("num_hidden_layers") or 0, config.get("first_k_dense_replace") or 0
    return bool(config.get("n_routed_experts")) and dense < layers


DEEPSEEK_ROUTER: Config = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
NEMOTRON_ROUTER: Config = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0}


def sigmoid_router(silent: Config, *, routes: Callable[[Config], bool], said: Config) -> Codec:
    """Sigmoid scores with a bias for the choice, in groups of experts of which each is worth the sum of its two best (DeepSeek-V3).

    Args:
        silent: what it means to leave an entry out.
        routes: whether a config.json has layers with experts.
        said: further entries, which have one value.
    """
    fixed = {"norm_topk_prob": True, **said}

    def write(full: Config) -> dict[str, Any]:
        if full["num_moe_experts"] is None:
            return {}
        for name, only in (("moe_router_score_function", "sigmoid"), ("moe_router_enable_expert_bias", True)):
            if full[name] != only:
                refuse(name, full[name], f"has no name there; only {only!r} has")
        topk, groups, chosen = (full[f"moe_router_{name}"] for name in ("topk", "num_groups", "group_topk"))
        if groups is not None and topk // chosen != 2:
            refuse(
                "moe_router_group_topk",
                chosen,
                f"has no name there: two experts score a group, so it must be moe_router_topk / 2 = {topk / 2}",
            )
        if topk == 1:
            refuse("moe_router_topk", topk, "has no name there: the weight of one expert is divided by itself; use 2 or more")
        scaling = full["moe_router_topk_scaling_factor"]
        return {
            "n_group": groups or 1,
            "topk_group": chosen or 1,
            "num_experts_per_tok": topk,
            "routed_scaling_factor": 1.0 if scaling is None else scaling,
            **fixed,
        }

    def read(config: Config) -> dict[str, Any]:
        if not routes(config):
            return {}
        for name, only in fixed.items():
            if config.get(name, only) != only:
                refuse(name, config[name], f"is not supported; only {only!r} is")
        groups, chosen, topk = (config.get(name, silent[name]) or 1 for name in ("n_group", "topk_group", "num_experts_per_tok"))
        ours: dict[str, Any] = {"moe_router_topk": topk, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        if groups > 1:
            if topk != 2 * chosen:
                refuse("topk_group", chosen, f"beside num_experts_per_tok={topk} is not supported; only half of that is")
            ours |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
        scaling = config.get("routed_scaling_factor", silent["routed_scaling_factor"])
        return ours | {"moe_router_topk_scaling_factor": None if scaling in (None, 1.0) else float(scaling)}

    ours = ("topk", "score_function", "enable_expert_bias", "num_groups", "group_topk", "topk_scaling_factor")
    return Codec(ours=tuple(f"moe_router_{name}" for name in ours), theirs=(*silent, *fixed), write=write, read=read)


def shared_width() -> Codec:
    """Of the shared expert that every layer with experts has (Qwen2)."""

    def write(full: Config) -> dict[str, Any]:
        width = full["moe_shared_expert_intermediate_size"]
        if width is None:
            refuse("moe_shared_expert_intermediate_size", None, "has no name there; every mixture of this family has a shared expert")
        return {"shared_expert_intermediate_size": width}

    read = renamed("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", 5632).read
    return Codec(ours=("moe_shared_expert_intermediate_size",), theirs=("shared_expert_intermediate_size",), write=write, read=read)
