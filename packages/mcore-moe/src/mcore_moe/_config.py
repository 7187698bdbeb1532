# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes and choices of a mixture-of-experts layer."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mcore_moe._layer_freq import read_layer_freq
from mcore_moe._limits import check_above_zero, check_drop_policy, check_groups, check_not_negative, check_score_function, check_topk
from mcore_parallel import ParallelPlan, check_field_types
from mcore_parallel.backends import check_grouped_width
from mcore_parallel.models import TransformerConfig

LOSS_NAMES: Mapping[str, str] = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "device_aux_loss": "device_load_balancing_loss",
    "comm_aux_loss": "comm_load_balancing_loss",
}
"""Load-balancing type -> what its loss is called in reports."""
_OF_DEVICES = ("device_aux_loss", "comm_aux_loss")
_WITHOUT_LOSS = ("sinkhorn", "quantile_balancing", "none")

RESERVED = frozenset({
    "inference_grouped_gemm_backend", "inference_moe_token_dispatcher_type", "moe_combine_bwd_dtype",
    "moe_enable_routing_replay", "moe_expert_rank_capacity_factor", "moe_flex_dispatcher_num_sms",
    "moe_mlp_glu_interleave_size", "moe_paged_stash", "moe_router_force_biased", "moe_single_grouped_bias", "moe_single_grouped_weight",
})  # fmt: skip
"""Fields that later versions may have."""

ELSEWHERE: Mapping[str, str] = MappingProxyType({
    "delay_wgrad_compute": "schedules of mcore_parallel.pipeline split the backward",
    "expert_model_parallel_size": "set ParallelPlan(ep=...)",
    "expert_tensor_parallel_size": "set ParallelPlan(etp=...)",
    "moe_grouped_gemm": "experts are always multiplied together; leave it out",
    "moe_layer_recompute": "set RecomputeConfig(modules=('mlp',))",
    "moe_pad_experts_for_cuda_graph_inference": "decode steps are graphs without padding; leave it out",
    "moe_per_layer_logging": "set TrainerConfig(per_layer_values=True)",
    "moe_permute_fusion": "rows are moved by fused kernels on a GPU; leave it out",
    "moe_router_fusion": "a GPU's kernels are chosen by themselves; leave it out",
    "moe_router_topk_limited_devices": "set moe_router_num_groups to ep, and moe_router_group_topk",
    "moe_upcycling_granularity": "moe_ffn_hidden_size says it; see upcycle_state_dict",
    "moe_use_legacy_grouped_gemm": "experts are always multiplied together; leave it out",
    "moe_use_upcycling": "call upcycle_state_dict",
    "overlap_moe_expert_parallel_comm": "call moe_feed_forward(config, pause=overlap.pause)",
})  # fmt: skip
"""Fields of Megatron-LM's configuration that have no counterpart here -> what to do instead."""

OF_FLEX: Mapping[str, str | None] = MappingProxyType({
    "moe_flex_dispatcher_backend": None, "moe_flex_dispatcher_fallback": None, "moe_flex_timeout_s": None,
    "moe_deepep_num_sms": "deepep", "moe_hybridep_num_sms": "hybridep",
    "moe_symmetric_exact_rows": "symmetric", "moe_symmetric_max_tokens": "symmetric",
})  # fmt: skip
"""Fields that only flex reads -> the backend that does; None for each of them."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture-of-experts feed-forward.

    Raises:
        ValueError: fields that do not fit together; names both.

    Example:
        >>> MoEConfig(num_moe_experts=8).moe_router_topk
        2
    """

    num_moe_experts: int
    """Routed experts of a layer."""
    moe_router_topk: int = 2
    """Experts a token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert; None for the feed-forward width of the model."""
    moe_layer_freq: int | tuple[int, ...] = 1
    """n: layers 0, n, 2n ... have experts, the others a dense feed-forward; or one 0 or 1 a layer. Not read where a pattern places E.
    Layers of multi-token prediction have experts."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the feed-forward that every token goes through beside its experts (of all shared experts together); None for none."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared experts' result by a learned sigmoid of the token."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared experts while the tokens travel to their experts, and their backward while gradients travel back. Results are
    the same. With the dispatcher alltoall; where nothing travels it changes nothing."""
    moe_latent_size: int | None = None
    """Width that the experts read and write: tokens are projected to it before they travel, and the sums back after. The router and the
    shared experts read the whole token. None for the hidden size."""
    moe_router_score_function: str = "softmax"
    """softmax, sigmoid or sqrtsoftplus."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the selection, without renormalising; else over the selected ones."""
    moe_router_topk_scaling_factor: float | None = None
    """Multiplies the weights."""
    moe_router_num_groups: int | None = None
    """Experts are cut into so many groups, and a token's experts lie in ``moe_router_group_topk`` of them."""
    moe_router_group_topk: int | None = None
    """Groups that a token's experts lie in; with ``moe_router_num_groups``."""
    moe_router_dtype: str | None = "fp32"
    """Precision of the gating matmul: fp32, fp64, or None for that of the parameters."""
    moe_router_bias: bool | None = None
    """A learned bias of the logits; None for the model's ``add_bias_linear``."""
    moe_router_enable_expert_bias: bool = False
    """Balance without a loss: a bias of each expert that is added for the selection only, and moved once a global batch."""
    moe_router_bias_update_rate: float = 1e-3
    """What that bias is moved by; 0 freezes it."""
    moe_router_bias_decay_steps: int | None = None
    """Step of the training, counted from 0 as those of the learning rate, from which the bias is frozen; None for never."""
    moe_router_bias_decay_style: str = "constant"
    """How its rate comes down to 0 by then: constant, all at once; linear or cosine, from the first step on."""
    moe_router_load_balancing_type: str | tuple[str, ...] = "aux_loss"
    """aux_loss (over a micro-batch), seq_aux_loss (over each sequence), global_aux_loss (over the global batch so far), device_aux_loss (of
    the picks of devices) and comm_aux_loss (of the tokens that are sent to devices; both over a micro-batch), or several of them;
    sinkhorn, which balances the selection instead; quantile_balancing, which sets the bias of the experts to what would have given each
    its even share of the global batch; none. A tuple of one is its element."""
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    """Weight of the load-balancing loss, one for each type; 0 switches it off."""
    moe_aux_loss_num_devices: int | None = None
    """Devices of device_aux_loss and comm_aux_loss: experts are cut into so many groups in order, as ``ParallelPlan.ep`` cuts them. What
    the layout is changes nothing. None for ``moe_router_num_groups``."""
    moe_z_loss_coeff: float | None = None
    """Weight of the mean squared log-sum-exp of the logits; None switches it off."""
    moe_router_report_entropy: bool = False
    """Report the mean entropy of a token's scores over all experts, as ``router_entropy``: from 0, one expert for certain, to log E."""
    moe_input_jitter_eps: float | None = None
    """In training, multiply the router's input by uniform noise in 1 - eps..1 + eps."""
    moe_apply_probs_on_input: bool = False
    """With one expert a token: multiply the token by its weight before the expert, instead of the result."""
    moe_router_force_load_balancing: bool = False
    """Route at random, for benchmarks only."""
    moe_token_dispatcher_type: str = "alltoall"
    """How tokens travel to ranks with other experts: alltoall, each pick to its expert; allgather, all tokens to all ranks; flex, each
    token once to each rank, by a backend. Ranks that hold all experts, or all tokens, exchange none."""
    moe_dispatch_fwd_dtype: str | None = None
    """What tokens travel to their experts in: fp8 (e4m3, with a scale for each 128 values), half the bytes of bfloat16; None for the dtype
    of the model. Experts read what has been rounded so in every layout, where nothing travels, too; results, and all gradients, travel in
    the dtype of the model. With the dispatcher alltoall."""
    moe_flex_dispatcher_backend: str = "deepep"
    """Who exchanges in flex: the libraries deepep and hybridep; symmetric, kernels that store in the memory of the other GPUs of a host."""
    moe_flex_dispatcher_fallback: str | None = None
    """What a model uses where one of its ranks lacks the backend, or cannot use it: alltoall, with a warning, or None to refuse. Decided
    when the model is built, by all ranks together."""
    moe_flex_timeout_s: float = 100.0
    """Longest wait of flex for the other ranks, when it is chosen and in each exchange of tokens."""
    moe_deepep_num_sms: int = 20
    """SMs that DeepEP's kernels take, an even number."""
    moe_hybridep_num_sms: int = 16
    """SMs that HybridEP's kernels take."""
    moe_symmetric_max_tokens: int | None = None
    """Tokens of a rank at most, for which symmetric takes memory; None for the most of any rank at the first exchange. Needed where later
    some ranks have more, and others not."""
    moe_symmetric_exact_rows: bool = False
    """The host waits in each exchange of symmetric for the number of rows, so that activations of experts take no more memory than those;
    else it never waits, and they are as large as for the worst routing: every token of the group on one rank."""
    moe_enable_deepep: bool = False
    """Deprecated: True is moe_token_dispatcher_type="flex" with moe_flex_dispatcher_backend="deepep"."""
    moe_expert_capacity_factor: float | None = None
    """Most picks of a rank's tokens that an expert keeps, in even shares; the others add nothing. None, or a negative number, for no
    bound."""
    moe_token_drop_policy: str = "probs"
    """Which picks an expert keeps: probs, the greatest weights; position, the first tokens."""
    moe_pad_expert_input_to_capacity: bool = False
    """Give every expert as many rows as its capacity, the missing ones zeros, so that no shape depends on the routing."""
    moe_router_padding_for_quantization: bool = False
    """In fp8 and fp4: fill the rows of every expert up with zeros to a multiple of what GEMMs of the recipe take, once, before the experts,
    instead of around each GEMM. Results are those without; nothing waits for the device."""
    moe_router_padding_for_fp8: bool = False
    """Deprecated name of ``moe_router_padding_for_quantization``."""

    def __new__(cls, **values: Any) -> "MoEConfig":
        if reserved := sorted(RESERVED & set(values)):
            raise ValueError(f"{reserved[0]}={values[reserved[0]]!r} is reserved and not implemented; leave it out")
        if foreign := sorted(set(ELSEWHERE) & set(values)):
            raise ValueError(f"{foreign[0]}={values[foreign[0]]!r} is no field of MoEConfig: {ELSEWHERE[foreign[0]]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_field_types(self)
        self._replace_deprecated()
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            # One type is its name, however it is written.
            if isinstance(value := getattr(self, name), tuple) and len(value) == 1:
                object.__setattr__(self, name, value[0])
        self._check_sizes()
        self._check_choices()
        self._check_losses()
        self._check_capacity()
        self._check_flex()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MoEConfig":
        """Of its fields by name, with lists, which JSON and YAML make of tuples, as tuples again, and ``moe_layer_freq`` also as
        Megatron-LM's command line has it ("([1]*3+[0]*1)*3").

        Raises:
            ValueError: as of the class; a text that is no such list.
        """
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if isinstance(freq := fields.get("moe_layer_freq"), str):
            fields["moe_layer_freq"] = read_layer_freq(freq)
        return cls(**fields)

    @property
    def loss_coefficients(self) -> Mapping[str, float]:
        """Load-balancing type -> its coefficient, of those that are on."""
        types, coefficients = _tuple(self.moe_router_load_balancing_type), _tuple(self.moe_aux_loss_coeff)
        return {name: weight for name, weight in zip(types, coefficients, strict=True) if weight and name in LOSS_NAMES}

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Auxiliary losses of a layer, and what has no coefficient: the entropy of the scores, if it is asked for, and with a capacity the
        share of the picks that it drops."""
        z_loss = ("z_loss",) if self.moe_z_loss_coeff else ()
        entropy = ("router_entropy",) if self.moe_router_report_entropy else ()
        drops = ("drop_rate",) if self.moe_expert_capacity_factor is not None else ()
        return (*(LOSS_NAMES[name] for name in self.loss_coefficients), *z_loss, *entropy, *drops)

    @property
    def num_balanced_devices(self) -> int:
        """Of device_aux_loss and comm_aux_loss; 1 without them."""
        devices = self.moe_aux_loss_num_devices
        return (self.moe_router_num_groups or 1) if devices is None else devices

    @property
    def most_devices_of_token(self) -> int:
        """Of those, how many a token is sent to at most: ``moe_router_group_topk`` where they are the router's groups."""
        devices = self.num_balanced_devices
        if self.moe_router_group_topk is not None and devices == self.moe_router_num_groups:
            return self.moe_router_group_topk
        return min(devices, self.moe_router_topk)

    def bias_update_rate(self, step: int | None) -> float:
        """Of the experts' bias at a step of the training.

        Raises:
            ValueError: ``moe_router_bias_decay_steps`` without a step.
        """
        rate, decay_steps = self.moe_router_bias_update_rate, self.moe_router_bias_decay_steps
        if decay_steps is None:
            return rate
        if step is None:
            raise ValueError(
                f"moe_router_bias_decay_steps={decay_steps} counts the steps of a schedule; pass lr=schedule.lr(n) to train_step, not a "
                "plain number"
            )
        left = max(0.0, 1.0 - step / decay_steps)
        shares = {"constant": math.ceil(left), "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}
        return rate * shares[self.moe_router_bias_decay_style]

    @property
    def noise_fields(self) -> str:
        """As ``mcore_parallel.nn.DrawsNoise``, of the router."""
        names = ("moe_input_jitter_eps", "moe_router_force_load_balancing")
        return " and ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name))

    @property
    def training_fields(self) -> str:
        """The fields by which tokens are routed otherwise in training than in evaluation, with their values; empty where none is."""
        sinkhorn = ["moe_router_load_balancing_type='sinkhorn'"] if self.moe_router_load_balancing_type == "sinkhorn" else []
        return " and ".join([*filter(None, [self.noise_fields]), *sinkhorn])

    def is_moe_layer(self, layer: int, num_layers: int) -> bool:
        """Whether a layer of a model without a pattern has experts.

        Args:
            layer: global number; from ``num_layers`` on those of multi-token prediction.
            num_layers: of the trunk.
        """
        freq = self.moe_layer_freq
        if layer >= num_layers:
            return True
        return layer % freq == 0 if isinstance(freq, int) else freq[layer] == 1

    def _check_sizes(self) -> None:
        if self.moe_ffn_hidden_size is not None and self.moe_ffn_hidden_size < 1:
            raise ValueError(
                f"moe_ffn_hidden_size={self.moe_ffn_hidden_size} must be at least 1; leave it out for the model's ffn_hidden_size"
            )
        if self.moe_latent_size is not None and self.moe_latent_size < 1:
            raise ValueError(f"moe_latent_size={self.moe_latent_size} must be at least 1; leave it out for the model's hidden_size")
        names = {"prefix": "moe_router_", "experts": "num_moe_experts"}
        check_topk(self.num_moe_experts, self.moe_router_topk, **names)
        shared, freq = self.moe_shared_expert_intermediate_size, self.moe_layer_freq
        if shared is not None and shared < 1:
            raise ValueError(f"moe_shared_expert_intermediate_size={shared} must be at least 1; leave it out for no shared experts")
        if self.moe_shared_expert_gate and shared is None:
            raise ValueError("moe_shared_expert_gate=True has nothing to gate; set moe_shared_expert_intermediate_size")
        if self.moe_shared_expert_overlap and shared is None:
            raise ValueError("moe_shared_expert_overlap=True has nothing to overlap; set moe_shared_expert_intermediate_size")
        if self.moe_shared_expert_overlap and self.moe_token_dispatcher_type != "alltoall":
            raise ValueError(
                f"moe_shared_expert_overlap=True needs moe_token_dispatcher_type='alltoall', found {self.moe_token_dispatcher_type!r}; "
                "leave one out"
            )
        if (freq < 1) if isinstance(freq, int) else (1 not in freq or set(freq) - {0, 1}):
            raise ValueError(f"moe_layer_freq={freq!r} must be at least 1, or one 0 or 1 a layer with a 1 among them")
        check_groups(self.num_moe_experts, self.moe_router_topk, self.moe_router_num_groups, self.moe_router_group_topk, **names)

    def _check_choices(self) -> None:
        score = self.moe_router_score_function
        check_score_function(score, pre_softmax=self.moe_router_pre_softmax, prefix="moe_router_")
        if self.moe_router_dtype not in (None, "fp32", "fp64"):
            raise ValueError(f"moe_router_dtype={self.moe_router_dtype!r} must be fp32, fp64 or None")
        plain = self.moe_router_topk == 1 and score == "softmax" and not self.moe_router_pre_softmax
        if plain and self.moe_router_load_balancing_type != "sinkhorn":
            raise ValueError(
                "moe_router_topk=1 with softmax needs moe_router_pre_softmax=True, else every weight is 1 and the router learns nothing"
            )
        quantiles = self.moe_router_load_balancing_type == "quantile_balancing"
        if self.moe_router_enable_expert_bias and score == "softmax" and not quantiles:
            raise ValueError(
                "moe_router_enable_expert_bias=True needs moe_router_score_function='sigmoid' or 'sqrtsoftplus', found 'softmax'"
            )
        if self.moe_apply_probs_on_input and self.moe_router_topk != 1:
            raise ValueError(
                f"moe_apply_probs_on_input=True needs moe_router_topk=1, found {self.moe_router_topk}: a token of several experts has "
                "several weights; leave one out"
            )
        if self.moe_token_dispatcher_type not in ("alltoall", "allgather", "flex"):
            raise ValueError(f"moe_token_dispatcher_type={self.moe_token_dispatcher_type!r} must be alltoall, allgather or flex")
        self._check_payload()
        scaling, rate = self.moe_router_topk_scaling_factor, self.moe_router_bias_update_rate
        if scaling is not None:
            check_above_zero("moe_router_topk_scaling_factor", scaling, "leave it out for 1")
        check_not_negative("moe_router_bias_update_rate", rate, "0 freezes the bias")
        if rate not in (0, _default("moe_router_bias_update_rate")) and not self.moe_router_enable_expert_bias:
            raise ValueError(f"moe_router_bias_update_rate={rate} moves no bias; set moe_router_enable_expert_bias=True, or leave it out")
        self._check_bias_decay()
        jitter = self.moe_input_jitter_eps
        if jitter is not None and not 0 <= jitter < 1:
            raise ValueError(f"moe_input_jitter_eps={jitter} must lie in 0..1, 1 excluded")

    def _check_payload(self) -> None:
        dtype = self.moe_dispatch_fwd_dtype
        if dtype not in (None, "fp8"):
            raise ValueError(f"moe_dispatch_fwd_dtype={dtype!r} must be fp8 or None")
        if dtype is not None and self.moe_token_dispatcher_type != "alltoall":
            raise ValueError(
                f"moe_dispatch_fwd_dtype={dtype!r} needs moe_token_dispatcher_type='alltoall', found {self.moe_token_dispatcher_type!r}, "
                "which sends the dtype of the model; leave one out"
            )
        if dtype is not None and self.moe_shared_expert_overlap:
            raise ValueError(
                f"moe_dispatch_fwd_dtype={dtype!r} does not go with moe_shared_expert_overlap=True, whose rows travel in the dtype of the "
                "model; leave one out"
            )

    def _check_bias_decay(self) -> None:
        steps, style = self.moe_router_bias_decay_steps, self.moe_router_bias_decay_style
        if style not in ("constant", "linear", "cosine"):
            raise ValueError(f"moe_router_bias_decay_style={style!r} must be constant, linear or cosine")
        if steps is None and style != "constant":
            raise ValueError(f"moe_router_bias_decay_style={style!r} needs moe_router_bias_decay_steps, the step of its end")
        if steps is None:
            return
        if steps < 1:
            raise ValueError(f"moe_router_bias_decay_steps={steps} must be at least 1; moe_router_bias_update_rate=0 freezes the bias")
        if not self.moe_router_enable_expert_bias or not self.moe_router_bias_update_rate:
            raise ValueError(
                f"moe_router_bias_decay_steps={steps} freezes a bias that never moves; set moe_router_enable_expert_bias=True and a "
                "moe_router_bias_update_rate, or leave it out"
            )
        if self.moe_router_load_balancing_type == "quantile_balancing" and style != "constant":
            raise ValueError(
                f"moe_router_bias_decay_style={style!r} has no rate to bring down: moe_router_load_balancing_type='quantile_balancing' "
                "sets the bias; leave it at 'constant', which freezes the bias"
            )

    def _check_losses(self) -> None:
        types, weights = _tuple(self.moe_router_load_balancing_type), _tuple(self.moe_aux_loss_coeff)
        for name in types:
            if name not in (*LOSS_NAMES, *_WITHOUT_LOSS):
                raise ValueError(f"moe_router_load_balancing_type={name!r} must be {', '.join((*LOSS_NAMES, *_WITHOUT_LOSS))}")
        if not types or len(types) != len(set(types)):
            raise ValueError(f"moe_router_load_balancing_type={types!r} must name one type at least, and none twice")
        if len(types) != len(weights):
            raise ValueError(
                f"moe_router_load_balancing_type={types!r} and moe_aux_loss_coeff={weights!r} must be equally long; give one a type"
            )
        if len(types) > 1 and set(_WITHOUT_LOSS) & set(types):
            raise ValueError(f"moe_router_load_balancing_type={types!r} combines {', '.join(_WITHOUT_LOSS)} with others; name it alone")
        for weight in weights:
            check_not_negative("moe_aux_loss_coeff", weight, "0 switches the loss off")
        sinkhorn = "sinkhorn" in types
        if set(_WITHOUT_LOSS) & set(types) and any(weights):
            raise ValueError(
                f"moe_aux_loss_coeff={self.moe_aux_loss_coeff} has no loss to weigh with moe_router_load_balancing_type={types!r}; "
                "set it to 0"
            )
        if "quantile_balancing" in types:
            self._check_quantiles()
        self._check_devices([name for name in types if name in _OF_DEVICES])
        if sinkhorn and (self.moe_router_num_groups or self.moe_router_enable_expert_bias):
            raise ValueError("moe_router_load_balancing_type='sinkhorn' selects by itself; leave moe_router_num_groups and expert bias out")
        if sinkhorn and self.moe_router_score_function != "softmax":
            raise ValueError(
                f"moe_router_load_balancing_type='sinkhorn' weighs by softmax, or with topk=1 by sigmoid, whatever "
                f"moe_router_score_function={self.moe_router_score_function!r} says; leave that at 'softmax'"
            )
        if sinkhorn and self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_pre_softmax=True changes nothing with moe_router_load_balancing_type='sinkhorn', whose softmax is over all "
                "experts; leave one out"
            )
        if self.moe_z_loss_coeff is not None:
            check_not_negative("moe_z_loss_coeff", self.moe_z_loss_coeff, "leave it out for none")

    def _check_devices(self, types: list[str]) -> None:
        devices, experts = self.num_balanced_devices, self.num_moe_experts
        if not types and self.moe_aux_loss_num_devices is not None:
            raise ValueError(
                f"moe_aux_loss_num_devices={self.moe_aux_loss_num_devices} is for moe_router_load_balancing_type='device_aux_loss' and "
                f"'comm_aux_loss', found {self.moe_router_load_balancing_type!r}; name one, or leave it out"
            )
        if not types:
            return
        if self.moe_aux_loss_num_devices is None and self.moe_router_num_groups is None:
            raise ValueError(
                f"moe_router_load_balancing_type={types[0]!r} balances devices; set moe_aux_loss_num_devices, as to the ep of the run, or "
                "moe_router_num_groups"
            )
        if devices < 2 or experts % devices:
            name = "moe_router_num_groups" if self.moe_aux_loss_num_devices is None else "moe_aux_loss_num_devices"
            raise ValueError(
                f"{name}={devices} must be at least 2 and divide num_moe_experts={experts} for moe_router_load_balancing_type={types[0]!r}"
            )

    def _check_quantiles(self) -> None:
        kind, rate = "moe_router_load_balancing_type='quantile_balancing'", self.moe_router_bias_update_rate
        if not self.moe_router_enable_expert_bias:
            raise ValueError(f"{kind} sets the bias of the experts; set moe_router_enable_expert_bias=True")
        if rate not in (0, _default("moe_router_bias_update_rate")):
            raise ValueError(f"{kind} has no use for moe_router_bias_update_rate={rate}; leave it out, or set 0, which freezes the bias")
        if self.moe_router_num_groups is not None:
            raise ValueError(
                f"{kind} compares all experts of a token, found moe_router_num_groups={self.moe_router_num_groups}; leave one out"
            )
        if self.moe_router_topk == self.num_moe_experts:
            raise ValueError(f"{kind} has nothing to balance: moe_router_topk={self.moe_router_topk} takes all experts; choose 'none'")

    def _check_capacity(self) -> None:
        factor, pad = self.moe_expert_capacity_factor, self.moe_pad_expert_input_to_capacity
        check_drop_policy("moe_token_drop_policy", self.moe_token_drop_policy)
        if factor is not None and factor < 0:
            object.__setattr__(self, "moe_expert_capacity_factor", None)
            factor = None
        if factor is not None:
            check_above_zero("moe_expert_capacity_factor", factor, "leave it out for no bound")
        if self.moe_token_drop_policy != "probs" and factor is None:
            raise ValueError(
                f"moe_token_drop_policy={self.moe_token_drop_policy!r} has nothing to drop; set moe_expert_capacity_factor, or leave it out"
            )
        if pad and factor is None:
            raise ValueError("moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor, which says how many rows that are")
        if factor is not None and "sinkhorn" in _tuple(self.moe_router_load_balancing_type):
            raise ValueError(
                f"moe_expert_capacity_factor={factor} does not go with moe_router_load_balancing_type='sinkhorn', which balances the "
                "selection itself; name a loss or none, or leave the factor out"
            )

    def _check_flex(self) -> None:
        if self.moe_flex_dispatcher_backend not in ("deepep", "hybridep", "symmetric"):
            raise ValueError(f"moe_flex_dispatcher_backend={self.moe_flex_dispatcher_backend!r} must be deepep, hybridep or symmetric")
        if self.moe_flex_dispatcher_fallback not in (None, "alltoall"):
            raise ValueError(f"moe_flex_dispatcher_fallback={self.moe_flex_dispatcher_fallback!r} must be alltoall or None")
        check_above_zero("moe_flex_timeout_s", self.moe_flex_timeout_s, "give seconds")
        if self.moe_deepep_num_sms < 2 or self.moe_deepep_num_sms % 2:
            raise ValueError(f"moe_deepep_num_sms={self.moe_deepep_num_sms} must be even and at least 2")
        if self.moe_hybridep_num_sms < 1:
            raise ValueError(f"moe_hybridep_num_sms={self.moe_hybridep_num_sms} must be at least 1")
        if self.moe_symmetric_max_tokens is not None and self.moe_symmetric_max_tokens < 1:
            raise ValueError(
                f"moe_symmetric_max_tokens={self.moe_symmetric_max_tokens} must be at least 1; leave it out for the first batch's"
            )
        for name, backend in OF_FLEX.items():
            value, chosen = getattr(self, name), self.moe_flex_dispatcher_backend
            if value == _default(name):
                continue
            if self.moe_token_dispatcher_type != "flex":
                raise ValueError(
                    f"{name}={value!r} is for moe_token_dispatcher_type='flex', found {self.moe_token_dispatcher_type!r}; leave one out"
                )
            if backend not in (None, chosen):
                raise ValueError(f"{name}={value!r} is for moe_flex_dispatcher_backend={backend!r}, found {chosen!r}; leave one out")
        if self.moe_token_dispatcher_type == "flex" and self.moe_pad_expert_input_to_capacity:
            raise ValueError(
                "moe_pad_expert_input_to_capacity=True does not go with moe_token_dispatcher_type='flex', whose backends size the rows "
                "themselves; use 'alltoall', or leave the padding out"
            )

    def _replace_deprecated(self) -> None:
        """The fields that took the place of deprecated ones are set, so that a copy of the config does not warn again."""
        successors: dict[str, dict[str, Any]] = {
            "moe_enable_deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
            "moe_router_padding_for_fp8": {"moe_router_padding_for_quantization": True},
        }
        for old, fields in successors.items():
            if getattr(self, old):
                for name, value in fields.items():
                    if (current := getattr(self, name)) not in (value, _default(name)):
                        raise ValueError(f"{old}=True is {name}={value!r}, found {current!r}; leave {old} out")
                text = " and ".join(f"{name}={value!r}" for name, value in fields.items())
                warnings.warn(f"{old} is deprecated; set {text}", DeprecationWarning, stacklevel=4)
                for name, value in {**fields, old: False}.items():
                    object.__setattr__(self, name, value)


def _default(name: str) -> Any:
    """Of a field of `MoEConfig`."""
    return getattr(MoEConfig, name)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def check_experts(
    config: MoEConfig, model: TransformerConfig, plan: ParallelPlan, *, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Whether a layout can divide the experts of a layer, and the device multiply them; costs no tensor.

    Args:
        config: the mixture.
        model: the layer's; its width, and that of experts that have none of their own.
        plan: tp, ep and etp are read.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: names field, value and what to change.
    """
    width, etp = config.moe_ffn_hidden_size or model.ffn_size, plan.expert_tp
    freq, shared = config.moe_layer_freq, config.moe_shared_expert_intermediate_size
    if model.hybrid_layer_pattern is None:
        if isinstance(freq, tuple) and len(freq) != model.num_layers:
            raise ValueError(f"moe_layer_freq has {len(freq)} entries, the model num_layers={model.num_layers}; give one a layer")
        dense = any(not config.is_moe_layer(layer, model.num_layers) for layer in range(model.num_layers))
        if dense and model.ffn_size % plan.tp:
            raise ValueError(f"tp={plan.tp} must divide ffn_hidden_size={model.ffn_size}; lower tp or round ffn_hidden_size up")
    if shared is not None and shared % plan.tp:
        raise ValueError(f"tp={plan.tp} must divide moe_shared_expert_intermediate_size={shared}; lower tp or change the width")
    if config.moe_latent_size is not None and model.add_bias_linear:
        raise ValueError(
            f"moe_latent_size={config.moe_latent_size} does not go with add_bias_linear=True: its projections have no biases; leave one out"
        )
    if config.moe_dispatch_fwd_dtype is not None and dtype == torch.float16:
        raise ValueError(
            f"moe_dispatch_fwd_dtype={config.moe_dispatch_fwd_dtype!r} sends numbers that float16 does not have; build the model in "
            "bfloat16 or float32, or leave it out"
        )
    if config.num_moe_experts % plan.ep:
        raise ValueError(f"ep={plan.ep} must divide num_moe_experts={config.num_moe_experts}; lower ep or change num_moe_experts")
    if width % etp:
        raise ValueError(f"etp={etp} must divide the expert width {width}; lower etp or change moe_ffn_hidden_size")
    if config.moe_latent_size is None:
        check_grouped_width("hidden_size", model.hidden_size, dtype, device)
    else:
        check_grouped_width("moe_latent_size", config.moe_latent_size, dtype, device)
    check_grouped_width("moe_ffn_hidden_size", width // etp, dtype, device)
