# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Everything a training run is told."""

import difflib
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan
from mcore_parallel.backends import Fp8Config
from mcore_parallel.data import MaskedTokensConfig, SpanCorruptionConfig
from mcore_parallel.data_parallel import DistributedDataParallelConfig
from mcore_parallel.graphs import CudaGraphConfig
from mcore_parallel.guard import RestartConfig, WatchdogConfig
from mcore_parallel.models import TransformerConfig, check_layout, dense_feed_forward
from mcore_parallel.nn import EXPERT_PARTS, OffloadConfig, RecomputeConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.pipeline import PipelineConfig
from mcore_parallel.tensor_parallel import LoraConfig
from mcore_parallel.training import (
    DumpConfig,
    ProfileConfig,
    RerunConfig,
    check_batch_sizes,
)
from mcore_tools.recipes._data import DataConfig
from mcore_tools.recipes._load import LoadConfig
from mcore_tools.recipes._log import LogConfig
from mcore_tools.recipes._rl import RLConfig
from mcore_tools.recipes._sft import SFTConfig
from mcore_tools.recipes._train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """What ``data_parallel=fsdp`` divides, and how far ahead it gathers.

    Raises:
        ValueError: a number out of its range.
    """

    zero_dp_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What each replica keeps a part of: nothing, the optimizer's state, with it the gradients, with both the parameters."""
    num_prefetch_units: int = 1
    """Layers whose parameters are gathered while another computes; 0 gathers nothing ahead."""
    fsdp_double_buffer: bool = False
    """Gather into two buffers that stay, so that memory does not fragment."""
    eight_bit_parameters: tuple[str, ...] = ()
    """Parameters, as ``[layers.*.qkv.weight,layers.*.mlp.*]``, that are gathered in 8 bits, half the bytes of 16: layers compute with
    scaled fp8 copies, made once a step; ``[]``, as where nothing is set, for none. Masters, checkpoints and exports keep their dtype."""

    def __post_init__(self) -> None:
        if self.num_prefetch_units < 0:
            raise ValueError(f"num_prefetch_units={self.num_prefetch_units} must not be negative; 0 gathers nothing ahead")
        if self.eight_bit_parameters and self.zero_dp_strategy != "optim_grads_params":
            raise ValueError(
                f"eight_bit_parameters={list(self.eight_bit_parameters)} are gathered, and zero_dp_strategy={self.zero_dp_strategy!r} "
                "leaves parameters whole; set zero_dp_strategy=optim_grads_params, or eight_bit_parameters=[]"
            )


DATA_PARALLEL = ("ddp", "fsdp", "fsdp2")
# Fields of the optimizer that scale the loss.
_OF_FLOAT16 = ("fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", "hysteresis_rearms")


@dataclass(frozen=True, kw_only=True)
class QKClipConfig:
    """Query and key weights of heads whose attention logits grew too large shrink after each step (`mcore_parallel.nn.clip_qk`)."""

    threshold: float = 100.0
    """Of a head's greatest logit since the last step; above it, weights shrink so that it would be this."""
    alpha: float = 0.5
    """Exponent of a head's factor that goes to its queries; the rest goes to its keys."""

    def __post_init__(self) -> None:
        if not self.threshold > 0 or not 0 <= self.alpha <= 1:
            raise ValueError(f"qk_clip.threshold={self.threshold} must be above 0 and qk_clip.alpha={self.alpha} in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run.

    Raises:
        ValueError: choices that do not go together.
    """

    model: TransformerConfig
    """Sizes and choices of the model."""
    moe: MoEConfig | None = None
    """None for dense feed-forwards."""
    masked: MaskedTokensConfig | None = None
    """Train a ``BertModel`` on hidden tokens; None for a ``GPTModel`` on the next ones."""
    spans: SpanCorruptionConfig | None = None
    """Train a ``T5Model`` on spans that are cut out of a text: its encoder reads ``train.seq_len`` tokens, its decoder writes the spans in
    ``spans.decoder_length``. Both have ``model.num_layers`` layers."""
    sft: SFTConfig | None = None
    """Fine-tune on conversations, which `mcore sft` tokenises; None for a corpus of text."""
    rl: RLConfig | None = None
    """Learn from rewards, which `mcore rl` does; None for texts."""
    lora: LoraConfig | None = None
    """Train adapters of the linear layers beside the frozen weights of ``load.path``; None to train all weights."""
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    """Degrees of parallelism."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Schedule and placement of the layers on the stages."""
    data_parallel: str = "ddp"
    """"ddp" keeps the model whole on every replica; "fsdp" divides parameters, gradients and optimizer state among the replicas, by
    megatron_fsdp; "fsdp2" does so by torch's ``fully_shard``, for models without experts on one pipeline stage."""
    ddp: DistributedDataParallelConfig | None = None
    """Of "ddp": buckets, dtypes and overlap. None for the fast choices: with the distributed optimizer parameters are gathered beside the
    next forward, unless graphs are replayed. Once one field is set, the others have the defaults of the class."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Of "fsdp"."""
    recompute: RecomputeConfig | None = None
    """What backwards compute again instead of keeping it; None for nothing."""
    offload: OffloadConfig | None = None
    """Activations that wait in host memory for their backward; None for none."""
    backend: Literal["torch", "te"] = "torch"
    """Who computes norms and projections: torch, or Transformer Engine (extra ``te``)."""
    fp8: Fp8Config | None = None
    """Recipe of projections in fp8; None for ``train.dtype``. Master weights, checkpoints and exports keep their dtype."""
    batch_invariant: bool = False
    """The bits of a token's forward depend on its own sequence alone, in training and in the engines of rl: their log-probabilities are
    equal. Slower, on a CPU many times."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length, batch and pace."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3))
    """Rule of the updates."""
    qk_clip: QKClipConfig | None = None
    """Bound attention logits, as large learning rates need; None for no bound."""
    data: DataConfig = field(default_factory=DataConfig)
    """The corpus and its tokenizer."""
    guard: WatchdogConfig = field(default_factory=WatchdogConfig)
    """How long ranks may wait for each other."""
    restart: RestartConfig = field(default_factory=RestartConfig)
    """How often the ranks start again in their processes when one of them fails."""
    rerun: RerunConfig = field(default_factory=RerunConfig)
    """What becomes of a loss that cannot be right."""
    log: LogConfig = field(default_factory=LogConfig)
    """Where the numbers go."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps that are traced; its folder lies in ``output``."""
    dumps: DumpConfig = field(default_factory=DumpConfig)
    """Steps whose tensors are written down; its folder lies in ``output``."""
    cuda_graphs: tuple[str, ...] = ()
    """Modules that are replayed from CUDA graphs, as ``[layers.*]`` or, with experts, ``[layers.*.attention]``; empty for none."""
    cuda_graph: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    """When and how they are captured."""
    communicators: str = ""
    """A .toml or .json file with NCCL's choices by group of ranks (max_ctas, is_high_priority_stream, use_sharp ...); empty for its own."""
    output: str = "runs/pretrain"
    """Folder for checkpoints and logs."""
    load: LoadConfig = field(default_factory=LoadConfig)
    """What it begins with."""

    def __post_init__(self) -> None:
        train = self.train
        known = [f"{part}.{item.name}" for part, kind in (("model", TransformerConfig), ("moe", MoEConfig)) for item in fields(kind)]
        known += ["train.dtype", *(["lora.rank", "lora.alpha", "lora.targets"] if self.load.adapter else [])]
        for name in self.load.override:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, 1)
                raise ValueError(f"load.override={name!r} is no field of a model; write {nearest[0] if nearest else 'model.FIELD'!r}")
        if train.global_batch_size % (train.micro_batch_size * self.plan.dp):
            raise ValueError(
                f"train.global_batch_size={train.global_batch_size} must be a multiple of "
                f"train.micro_batch_size={train.micro_batch_size} * plan.dp={self.plan.dp}"
            )
        check_batch_sizes(train.batch_sizes(), train.micro_batch_size, self.plan.dp)
        if self.data_parallel not in DATA_PARALLEL:
            raise ValueError(f"data_parallel={self.data_parallel!r} must be one of {', '.join(DATA_PARALLEL)}")
        # It would never be read: while a run has steps of its own, it goes on from the newest.
        if self.load.path and Path(os.path.abspath(self.load.path)).is_relative_to(Path(os.path.abspath(self.output)) / "checkpoints"):
            raise ValueError(f"load.path={self.load.path!r} lies in output={self.output!r}; begin in another folder, or set load.path=")
        feed_forward = moe_feed_forward(self.moe) if self.moe else dense_feed_forward
        check_layout(self.model, self.plan, feed_forward=feed_forward)
        if self.moe and self.recompute:
            self.recompute.check_noise(self.moe.noise_fields, ("mlp",))
        if self.moe and self.cuda_graphs and self.cuda_graph.recompute and self.moe.noise_fields:
            raise ValueError(
                f"cuda_graph.recompute=true would draw others in the backward than {self.moe.noise_fields} drew; set it "
                "to false, or draw none"
            )
        if self.masked:
            self._check_masked(self.masked)
        if self.spans:
            self._check_spans(self.spans)
        if self.rl:
            self._check_rl(self.rl)
        if (self.sft or self.rl) and train.seq_len % self.sequence_multiple:
            kind = "conversations" if self.sft else "answers"
            raise ValueError(f"train.seq_len={train.seq_len} must be a multiple of 2 * plan.cp={2 * self.plan.cp}, as {kind} are")
        if self.cuda_graphs and self.cuda_graph.is_external and self.plan.pp > 1:
            raise ValueError(
                f"cuda_graph.cuda_graph_impl='transformer_engine' waits for the device, on which plan.pp={self.plan.pp} stages wait for "
                "each other; set cuda_graph.cuda_graph_impl=local, or plan.pp=1"
            )
        self._check_parts()
        if self.load.upcycle:
            self._check_upcycle()
        if self.lora:
            self._check_lora(self.lora)
        elif self.sft and self.sft.export == "adapter":
            raise ValueError("sft.export='adapter' needs adapters; set lora.rank=16, or sft.export=merged")
        if self.dumps.every:
            self._check_dumps()
        if self.data_parallel != "ddp":
            self._check_fully_sharded()

    @property
    def encoder(self) -> str:
        """Field by which the model has an encoder, masked or spans; empty for one that predicts the next token."""
        return "masked" if self.masked else "spans" if self.spans else ""

    @property
    def sequence_multiple(self) -> int:
        """What the length of each packed sequence divides by."""
        return 2 * self.plan.cp if self.plan.cp > 1 else 1

    def _check_parts(self) -> None:
        """Parts that concern some models or layouts only."""
        if self.ddp is not None:
            if self.data_parallel != "ddp":
                raise ValueError(f"ddp is set, but data_parallel={self.data_parallel!r}; set ddp=none, or data_parallel=ddp")
            if self.ddp.use_distributed_optimizer != self.optimizer.use_distributed_optimizer:
                raise ValueError(
                    f"ddp.use_distributed_optimizer={self.ddp.use_distributed_optimizer} and "
                    f"optimizer.use_distributed_optimizer={self.optimizer.use_distributed_optimizer} must be equal; set both"
                )
            if self.ddp.overlap_param_gather and self.cuda_graphs:
                raise ValueError("ddp.overlap_param_gather=true waits inside the modules, which no graph replays; set it to false")
        if self.moe is None and (self.plan.ep > 1 or self.plan.expert_tp > 1):
            name = "ep" if self.plan.ep > 1 else "etp"
            raise ValueError(f"plan.{name}={getattr(self.plan, name)} divides experts, and the model has none; set plan.{name}=1, or moe")
        if self.fsdp != FSDPConfig() and self.data_parallel != "fsdp":
            raise ValueError(f"fsdp is set, but data_parallel={self.data_parallel!r}; set data_parallel=fsdp")
        if self.load.adapter and self.rl:
            raise ValueError(
                f"load.adapter={self.load.adapter!r} is for lora, and rl trains whole weights; merge it (mcore convert merge-adapter), set "
                "load.path to the result and load.adapter="
            )
        if self.fsdp.eight_bit_parameters and self.rl:
            raise ValueError("fsdp.eight_bit_parameters are rounded in the learner and not in engines, which rl needs; set them to []")
        self._check_documents()
        if self.train.mtp_loss_scaling_factor != TrainConfig().mtp_loss_scaling_factor and not self.model.mtp_num_layers:
            raise ValueError(
                f"train.mtp_loss_scaling_factor={self.train.mtp_loss_scaling_factor} weighs heads that predict further tokens, and "
                "model.mtp_num_layers=0; set model.mtp_num_layers=1, or leave the factor at its default"
            )
        if self.qk_clip:
            self._check_qk_clip()
        if self.batch_invariant:
            self._check_batch_invariant()
        if self.train.dtype == "float16" and (self.fp8 or (self.lora and self.lora.base_dtype)):
            name = "fp8" if self.fp8 else "lora.base_dtype"
            raise ValueError(f"{name} widens to bfloat16, and train.dtype='float16'; set train.dtype=bfloat16, or {name}=none")
        if self.train.dtype != "float16":
            for name in _OF_FLOAT16:
                if (value := getattr(self.optimizer, name)) != getattr(OptimizerConfig, name):
                    raise ValueError(
                        f"optimizer.{name}={value} scales the loss of float16, and train.dtype={self.train.dtype!r}; set "
                        f"train.dtype=float16, or leave optimizer.{name} at its default"
                    )
        if self.masked and (self.fp8 or self.backend != "torch"):
            raise ValueError("masked trains a BertModel, which has torch's layers in its dtype; set fp8=none and backend=torch")
        if self.offload and not self.moe and (parts := sorted({*EXPERT_PARTS} & {*self.offload.modules})):
            raise ValueError(f"offload.modules holds {parts}, which lie inside experts; this model has none, name mlp")
        if self.recompute and not self.moe and self.recompute.expert_parts:
            raise ValueError(
                f"recompute.modules holds {self.recompute.expert_parts}, which lie inside experts; this model has none, name mlp"
            )
        if self.offload and self.cuda_graphs:
            raise ValueError("offload and cuda_graphs exclude one another: a graph keeps its own activations; set one of them to none")

    def _check_documents(self) -> None:
        """What is said of the documents of a text."""
        for name in ("inter_document_masking", "eod_mask_loss"):
            taken = [part for part in ("sft", "rl", "masked", "spans") if getattr(self, part) is not None]
            if getattr(self.data, name) and taken:
                raise ValueError(
                    f"data.{name}=true is for texts whose next tokens are predicted, and {taken[0]} is set; set data.{name}=false"
                )
        for part in ("sft", "rl"):
            if self.data.fim is not None and getattr(self, part) is not None:
                raise ValueError(f"data.fim rearranges documents of text, of which {part} has none; set data.fim=none")
        if self.data.inter_document_masking and self.plan.cp > 1:
            raise ValueError(
                f"data.inter_document_masking=true does not go with plan.cp={self.plan.cp}, which cuts each document evenly; set plan.cp=1"
            )

    def _check_upcycle(self) -> None:
        if self.moe is None:
            raise ValueError("load.upcycle=true makes a mixture, and moe=none; set moe.num_moe_experts=8, or load.upcycle=false")
        for name in ("lora", "rl"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"load.upcycle=true does not go with {name}: train the mixture by `mcore train` first, and begin with its checkpoint; "
                    "set load.upcycle=false"
                )

    def _check_qk_clip(self) -> None:
        taken = {
            "model.qk_layernorm=true, which bounds logits already; set it to false": self.model.qk_layernorm,
            "masked, whose attention is not tracked; set masked=none": self.masked is not None,
            "lora, which freezes these weights; set lora=none": self.lora is not None,
            f"data_parallel={self.data_parallel!r}, whose weights lie in slices; set data_parallel=ddp": self.data_parallel != "ddp",
            f"plan.pp={self.plan.pp}; set plan.pp=1": self.plan.pp > 1,
            f"cuda_graphs={list(self.cuda_graphs)}, which replay without a look at logits; set cuda_graphs=[]": bool(self.cuda_graphs),
        }
        if reasons := [reason for reason, found in taken.items() if found]:
            raise ValueError(f"qk_clip does not go with {reasons[0]}, or qk_clip=none")

    def _check_batch_invariant(self) -> None:
        taken = {
            f"backend={self.backend!r}; set backend=torch": self.backend != "torch",
            "fp8, whose scales are of all tokens of a step; set fp8=none": self.fp8 is not None,
            "masked, a BertModel; set masked=none": self.masked is not None,
        }
        if reasons := [reason for reason, found in taken.items() if found]:
            raise ValueError(f"batch_invariant=true does not go with {reasons[0]}, or batch_invariant=false")

    def _check_lora(self, lora: LoraConfig) -> None:
        if not self.load.path or self.load.take != "weights":
            raise ValueError(
                f"lora trains beside the weights of another model, found load.path={self.load.path!r} and load.take={self.load.take!r}; "
                "name a Hugging Face folder or a checkpoint with load.path, and set load.take=weights"
            )
        if self.train.local_checkpoint_interval:
            raise ValueError(
                f"train.local_checkpoint_interval={self.train.local_checkpoint_interval} keeps whole models on the nodes, and lora saves "
                "adapters alone; lower train.checkpoint_interval, and set train.local_checkpoint_interval=0 train.local_checkpoint_folder="
            )
        if self.rl:
            raise ValueError("lora and rl do not go together yet: engines take whole weights from the learner; set lora=none")
        if self.masked or self.backend != "torch":
            raise ValueError(
                f"lora needs the layers of a GPTModel with backend=torch, found backend={self.backend!r} and "
                f"masked={'none' if self.masked is None else 'set'}; set masked=none and backend=torch"
            )
        if self.moe and self.moe.moe_router_enable_expert_bias and self.moe.moe_router_bias_update_rate:
            raise ValueError(
                f"lora freezes the router, and moe.moe_router_bias_update_rate={self.moe.moe_router_bias_update_rate} changes its bias; "
                "set it to 0"
            )
        if lora.base_dtype and (self.fp8 or self.data_parallel != "ddp"):
            raise ValueError(
                f"lora.base_dtype={lora.base_dtype!r} keeps frozen weights whole on every replica and computes their products, found "
                f"data_parallel={self.data_parallel!r} and fp8={'none' if self.fp8 is None else 'set'}; set data_parallel=ddp and fp8=none"
            )
        if lora.dropout and self.cuda_graphs:
            raise ValueError(f"lora.dropout={lora.dropout} draws on the host, which no graph replays; set cuda_graphs=[] or lora.dropout=0")
        if lora.dropout and self.recompute and not self.recompute.preserve_rng_state:
            raise ValueError(f"lora.dropout={lora.dropout} must be drawn alike in a recomputation; set recompute.preserve_rng_state=true")

    def _check_dumps(self) -> None:
        if self.data_parallel != "ddp" or self.cuda_graphs:
            raise ValueError(
                f"dumps.every={self.dumps.every} looks at the tensors of whole modules, which data_parallel={self.data_parallel!r} and "
                f"cuda_graphs={list(self.cuda_graphs)} hide; set data_parallel=ddp and cuda_graphs=[], or dumps.every=0"
            )
        if self.dumps.gradients and self.optimizer.use_distributed_optimizer:
            raise ValueError(
                "dumps.gradients=true needs gradients that are whole on every replica; set dumps.gradients=false or "
                "optimizer.use_distributed_optimizer=false"
            )
        if self.plan.cp > 1:
            raise ValueError(f"dumps.every={self.dumps.every} needs plan.cp=1, whose ranks see whole sequences, found {self.plan.cp}")

    def _check_masked(self, masked: MaskedTokensConfig) -> None:
        if self.sft:
            raise ValueError("masked and sft both say what is learnt; set masked=none or sft=none")
        if self.moe or self.data_parallel != "ddp":
            raise ValueError("masked trains a BertModel, which has no experts and no fsdp; set moe=none and data_parallel=ddp")
        if masked.mask_token >= self.model.vocab_size:
            raise ValueError(
                f"masked.mask_token={masked.mask_token} must lie below model.vocab_size={self.model.vocab_size}; raise vocab_size"
            )

    def _check_spans(self, spans: SpanCorruptionConfig) -> None:
        parts = (
            *("moe", "masked", "sft", "rl", "lora", "recompute", "offload", "fp8", "qk_clip", "cuda_graphs"),
            *("batch_invariant", "data_parallel", "backend"),
        )
        unset = {item.name: item.default for item in fields(self)}
        for name in parts:
            if getattr(self, name) != unset[name]:
                default = {None: "none", (): "[]", False: "false"}.get(unset[name], unset[name])
                raise ValueError(f"spans trains a T5Model, which does not go with {name}; set {name}={default}, or spans=none")
        for name in ("pp", "vpp", "cp"):
            if getattr(self.plan, name) > 1:
                raise ValueError(
                    f"spans trains a T5Model, whose layers stay together, found plan.{name}={getattr(self.plan, name)}; set plan.{name}=1"
                )
        if (largest := max(*spans.sentinels, spans.bos_token, spans.eos_token, spans.pad_token)) >= self.model.vocab_size:
            raise ValueError(
                f"spans has a token {largest}, which must lie below model.vocab_size={self.model.vocab_size}; raise vocab_size"
            )

    def _check_rl(self, rl: RLConfig) -> None:
        """What learns from rewards has no texts, and a loop of its own."""
        if self.sft or self.masked:
            raise ValueError("rl learns from rewards, sft and masked from texts; set sft=none and masked=none")
        train = self.train
        if train.batch_ramp_up or train.batch_steps:
            raise ValueError("train.batch_ramp_up and train.batch_steps are for texts; train.global_batch_size is the answers of an update")
        if train.deterministic:
            raise ValueError("train.deterministic=true is of algorithms that engines do not all have; set it to false for rl")
        rl.grpo(seq_len=train.seq_len, micro_batch_size=train.micro_batch_size, global_batch_size=train.global_batch_size)
        rl.objective()
        if rl.router_replay and self.moe is None:
            raise ValueError(f"rl.router_replay={rl.router_replay!r}, and the model has no experts; set it to false")
        if self.moe is not None and (named := self.moe.training_fields):
            raise ValueError(f"moe.{named}: the policy that is trained would be another one than the one that draws; leave it out for rl")
        if self.moe is not None and self.moe.moe_expert_capacity_factor is not None and rl.needs_engine:
            raise ValueError(
                f"moe.moe_expert_capacity_factor={self.moe.moe_expert_capacity_factor} has a token's fate depend on those beside it, which "
                "engines refuse; set it to none for rl"
            )
        for name in ("weight_dtype", "kv_cache_dtype"):
            if self.batch_invariant and (value := getattr(rl, name)) is not None:
                raise ValueError(
                    f"rl.{name}={value!r} rounds what the engine computes with, and batch_invariant=True has it agree with the trainer to "
                    f"the last bit; set rl.{name}=none, or batch_invariant=false"
                )
        if rl.engine_tp > 1:
            self._check_engine_ranks(rl)
        if rl.eval_samples and not train.eval_interval and not rl.eval_on_start:
            raise ValueError(
                f"rl.eval_samples={rl.eval_samples} has no effect without evaluations; set train.eval_interval, or rl.eval_samples=0"
            )
        if train.warmup_steps >= train.steps:
            raise ValueError(f"train.warmup_steps={train.warmup_steps} must be below train.steps={train.steps}, the iterations")
        if rl.packing is not None and rl.packing.share_prompts and self.plan.cp > 1:
            raise ValueError(
                f"rl.packing.share_prompts=True: a prompt is not split over plan.cp={self.plan.cp} ranks; set plan.cp=1, or it to false"
            )
        if rl.packing is not None and rl.packing.device_bounds and not self.cuda_graphs:
            raise ValueError(
                "rl.packing.device_bounds=True is for CUDA graphs, found cuda_graphs=[]; set cuda_graphs=[layers.*], or it to false"
            )
        if rl.packing is not None and rl.packing.alignment % self.sequence_multiple:
            raise ValueError(f"rl.packing.alignment={rl.packing.alignment} must be a multiple of 2 * plan.cp={2 * self.plan.cp}")
        if self.plan.vpp > 1:
            raise ValueError(f"rl scores answers with one chunk a stage, found plan.vpp={self.plan.vpp}; set plan.vpp=1")
        if self.cuda_graphs:
            self._check_rl_graphs(rl)
        if named := [name for name in self.fields_of_train if name not in ("log.per_layer_values", "cuda_graphs")]:
            raise ValueError(f"{named[0]} is for `mcore train` only, and rl is set; leave it at its default")

    def _check_rl_graphs(self, rl: RLConfig) -> None:
        """What changes from update to update, or comes back elsewhere, which graphs of ``rl`` would not see."""
        graphs = f"cuda_graphs={list(self.cuda_graphs)}"
        if rl.packing is not None and not rl.packing.device_bounds:
            beside = "cuda_graphs=[]" if rl.packing.share_prompts or rl.packing.alignment > 1 else "rl.packing.device_bounds=true"
            raise ValueError(
                f"{graphs}: rl.packing.device_bounds=False leaves the bounds of bins on the host, which no graph replays; set {beside}, or "
                "rl.packing=none for rows"
            )
        if rl.memory.release_gradients:
            raise ValueError(
                f"{graphs}: rl.memory.release_gradients=True brings gradients back elsewhere than where graphs add to them, and each "
                "iteration would capture anew; set it to false, or cuda_graphs=[]"
            )

    def _check_engine_ranks(self, rl: RLConfig) -> None:
        """Engines of ``rl`` over several ranks."""
        if self.plan.world_size % rl.engine_tp:
            raise ValueError(f"rl.engine_tp={rl.engine_tp} must divide the {self.plan.world_size} ranks of plan; change one")
        if self.batch_invariant:
            raise ValueError(f"rl.engine_tp={rl.engine_tp}: batch_invariant=true is served on one rank; set rl.engine_tp=1, or it to false")
        try:
            check_layout(self.model, self.engine_plan, feed_forward=moe_feed_forward(self.moe) if self.moe else dense_feed_forward)
        except ValueError as error:
            raise ValueError(f"rl.engine_tp={rl.engine_tp}: {error}") from None

    @property
    def engine_plan(self) -> ParallelPlan:
        """Layout of the engines of ``rl`` over the ranks of ``plan``, each a data-parallel rank of it."""
        tp = 1 if self.rl is None else self.rl.engine_tp
        even = self.moe is not None and self.moe.num_moe_experts % tp == 0
        return ParallelPlan(tp=tp, ep=tp if even else 1, dp=self.plan.world_size // tp, sequence_parallel=False)

    @property
    def fields_of_train(self) -> list[str]:
        """Names of fields off their defaults that `mcore train` and `mcore sft` follow and no other command does."""
        unused = {"cuda_graphs": (), "dumps": DumpConfig(), "profile": ProfileConfig(), "restart": RestartConfig(), "rerun": RerunConfig()}
        unused |= {"qk_clip": None}
        named = [name for name, default in unused.items() if getattr(self, name) != default]
        named += ["train.dtype=float16"] if self.train.dtype == "float16" else []
        named += ["data.inter_document_masking"] if self.data.inter_document_masking else []
        named += [] if self.log.per_layer_values else ["log.per_layer_values"]
        named += [] if self.train.mtp_loss_scaling_factor == TrainConfig().mtp_loss_scaling_factor else ["train.mtp_loss_scaling_factor"]
        named += [f"train.{name}" for name in ("local_checkpoint_interval", "checkpoint_async_steps") if getattr(self.train, name)]
        return named + [
            f"log.{name}" for name in ("straggler_interval", "timers_interval", "telemetry", "peak_tflops") if getattr(self.log, name)
        ]

    def _check_fully_sharded(self) -> None:
        if self.data_parallel == "fsdp2":
            self._check_torch_sharded()
        if self.cuda_graphs:
            raise ValueError(
                f"data_parallel={self.data_parallel!r} gathers parameters by hooks inside the layers, which no graph replays; set "
                f"cuda_graphs=[], found {list(self.cuda_graphs)}, or data_parallel='ddp'"
            )
        if self.pipeline.schedule not in ("auto", "1f1b", "interleaved"):
            raise ValueError(
                f"data_parallel={self.data_parallel!r} cannot take backwards apart, which pipeline.schedule={self.pipeline.schedule!r} "
                "does; set pipeline.schedule=auto, or data_parallel='ddp'"
            )
        if self.optimizer.optimizer == "muon" or any(group.optimizer == "muon" for group in self.optimizer.param_groups):
            raise ValueError(
                f"data_parallel={self.data_parallel!r} cannot step with optimizer='muon', which needs whole matrices; use 'adam', or 'ddp'"
            )

    def _check_torch_sharded(self) -> None:
        if self.moe:
            raise ValueError("data_parallel='fsdp2' does not divide experts among their own replicas; set data_parallel=fsdp, or moe=none")
        for name in ("pp", "vpp"):
            if getattr(self.plan, name) > 1:
                raise ValueError(f"data_parallel='fsdp2' needs plan.{name}=1, found {getattr(self.plan, name)}; set data_parallel=fsdp")
        if self.plan.dp == 1:
            raise ValueError("data_parallel='fsdp2' divides among replicas, found plan.dp=1; raise dp, or set data_parallel=ddp")
