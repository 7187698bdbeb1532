# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two models on grids of their own, trained as one: an encoder that looks at patches, and a decoder that names them.

python -m mcore_tools.joint
python -m mcore_tools.joint --set encoder.dp=3 --set decoder.dp=2 --set decoder.tp=1 --set pipeline.schedule=zero_bubble
"""

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel import Group, HyperCommGrid, ParallelPlan, ProcessGroups
from mcore_parallel.comm import BridgeBatch, BridgeCommunicator, BridgeEnd, TensorSpec, all_reduce
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ChainLink, PipelineConfig, StageLayout, plan_pipeline, run_schedule
from mcore_parallel.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser
from mcore_tools.exit_code import exit_code
from mcore_tools.launch import launch
from mcore_tools.recipes import add_fields_option, override
from mcore_tools.torchrun import report_error

# B sequences, P patches a sequence, C features a patch, D width of the decoder, V classes


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """The two grids, the two models and their task.

    Raises:
        ValueError: a grid with other degrees than tp and dp, a schedule of several chunks.
    """

    encoder: ParallelPlan = field(default_factory=lambda: ParallelPlan(dp=2))
    """Degrees of the encoder."""
    decoder: ParallelPlan = field(default_factory=lambda: ParallelPlan(tp=2))
    """Degrees of the decoder."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Of the two stages that the models are."""
    encoder_model: TransformerConfig = field(default_factory=lambda: _sizes(2, 32, 16))
    """Sizes of the encoder."""
    decoder_model: TransformerConfig = field(default_factory=lambda: _sizes(2, 48, 16))
    """Sizes of the decoder."""
    num_patches: int = 6
    """Patches of a sequence."""
    num_features: int = 12
    """Features of a patch."""
    noise: float = 0.3
    """Added to the features of a patch's class."""
    steps: int = 60
    """Updates of the run."""
    micro_batches: int = 4
    """Micro-batches of a step."""
    micro_batch_size: int = 6
    """Sequences of all replicas together."""
    lr: float = 5e-3
    """Learning rate."""
    dtype: str = "float32"
    """Of parameters and activations."""
    seed: int = 0
    """Of the first weights and the data."""

    def __post_init__(self) -> None:
        for name in ("encoder", "decoder"):
            plan: ParallelPlan = getattr(self, name)
            if plan.world_size != plan.tp * plan.dp or plan.vpp > 1:
                raise ValueError(f"{name}={plan} must have tp and dp only; set pp, cp and vpp to 1")
            if self.micro_batch_size < plan.dp:
                raise ValueError(f"micro_batch_size={self.micro_batch_size} must give each of {name}.dp={plan.dp} replicas a sequence")

    @property
    def num_ranks(self) -> int:
        return self.encoder.world_size + self.decoder.world_size

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "float64": torch.float64}[self.dtype]

    @property
    def num_labels(self) -> int:
        """Of a step."""
        return self.micro_batches * self.micro_batch_size * self.num_patches


class ImageEncoder(nn.Module):
    """Patches [B, P, C] -> [B * P, D]; every patch sees all of its sequence."""

    def __init__(self, config: JointConfig, groups: ProcessGroups, device: torch.device | str) -> None:
        super().__init__()
        width, out, dtype = config.encoder_model.hidden_size, config.decoder_model.hidden_size, config.torch_dtype
        place = {"gather_output": True, "dtype": dtype, "device": device}
        inner = StageLayout(layers=range(config.encoder_model.num_layers))
        self.inward = ColumnParallelLinear(config.num_features, width, groups, seed=config.seed + 1, **place)
        self.trunk = GPTModel(
            config.encoder_model, groups, attention_core=see_all, layers=inner, dtype=dtype, device=device, seed=config.seed
        )
        self.outward = ColumnParallelLinear(width, out, groups, seed=config.seed + 2, **place)

    def forward(self, patches_BPC: Tensor) -> Tensor:
        B, P, _ = patches_BPC.shape
        hidden, _ = self.trunk(self.inward(patches_BPC.flatten(0, 1)), Step.causal(B, P, patches_BPC.device))
        return self.outward(hidden)


class Decoder(nn.Module):
    """Names the patches one behind the other: reads the encoder's rows, then its own names so far."""

    def __init__(self, config: JointConfig, groups: ProcessGroups, device: torch.device | str) -> None:
        super().__init__()
        model, dtype = config.decoder_model, config.torch_dtype
        inner = StageLayout(layers=range(model.num_layers), loss=True)
        self.embedding = VocabParallelEmbedding(
            model.vocab_size, model.hidden_size, groups, dtype=dtype, device=device, seed=config.seed + 3
        )
        self.trunk = GPTModel(model, groups, layers=inner, dtype=dtype, device=device, seed=config.seed + 4)

    def forward(self, rows_TD: Tensor, classes_BP: Tensor) -> Tensor:
        """Summed cross entropy of the names."""
        B, P = classes_BP.shape
        names_BP = F.pad(classes_BP[:, :-1], (1, 0))  # class 0 also begins
        names_TD = self.embedding(names_BP.flatten())
        hidden = torch.cat([rows_TD.view(B, P, -1), names_TD.view(B, P, -1)], 1).flatten(0, 1)
        output, _ = self.trunk(hidden, Step.causal(B, 2 * P, rows_TD.device))
        labels_BS = F.pad(classes_BP, (P, 0))
        return output.loss_sum(labels_BS.flatten(), (torch.arange(2 * P, device=rows_TD.device) >= P).to(rows_TD.dtype).repeat(B))


def see_all(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
    """Attention of every token to all of its sequence."""
    q, k, v = (x.view(step.batch_size, step.seq_len, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2).flatten(0, 1)


def micro_batch(config: JointConfig, step: int, number: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Patches [B, P, C] and their classes [B, P] of all replicas; the same on every rank."""
    looks = torch.randn(config.decoder_model.vocab_size, config.num_features, generator=torch.Generator().manual_seed(config.seed))
    generator = torch.Generator().manual_seed((config.seed * 100_003 + step) * 1009 + number + 1)
    shape = (config.micro_batch_size, config.num_patches)
    classes_BP = torch.randint(config.decoder_model.vocab_size, shape, generator=generator)
    noise_BPC = torch.randn(*shape, config.num_features, generator=generator) * config.noise
    return (looks[classes_BP] + noise_BPC).to(device, config.torch_dtype), classes_BP.to(device)


class Side:
    """A model with what updates it."""

    def __init__(self, model: nn.Module, config: JointConfig, groups: ProcessGroups) -> None:
        self.model, self.lr, self.scale = model, config.lr, 1 / config.num_labels
        self.sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
        self.optimizer = MegatronOptimizer(OptimizerConfig(lr=config.lr), self.sync, groups)

    def update(self) -> None:
        self.sync.finish_grad_sync()
        self.optimizer.step(grad_scale=self.scale, lr=self.lr)


def train_joint(config: JointConfig, kind: str = "cpu", log_every: int = 0) -> list[float]:
    """On every rank of a world: the encoder's grid first, the decoder's behind it. Mean loss of each step, on all ranks."""
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    plans, offset = [_whole(config.encoder), _whole(config.decoder)], config.encoder.world_size
    # All ranks make the groups of both grids, in one order.
    groups = [ProcessGroups.build(plan, rank_offset=n * offset, leave_idle=True) for n, plan in enumerate(plans)]
    grids = [HyperCommGrid((plan.tp, plan.dp), ("tp", "dp"), n * offset) for n, plan in enumerate(plans)]
    bridge = BridgeCommunicator(BridgeEnd.of(grids[0], last=True), BridgeEnd.of(grids[1], last=False))
    decodes = rank >= offset
    mine = groups[decodes]
    batch = BridgeBatch(
        sequence_lengths=(config.num_patches,) * config.micro_batch_size,
        hidden_size=config.decoder_model.hidden_size,
        dtype=config.torch_dtype,
        device=device,
    )
    link = ChainLink(
        mine.pp, first_stage=int(decodes), num_stages=2, batch=batch, before=bridge if decodes else None, after=None if decodes else bridge
    )
    share = _share(config.micro_batch_size, mine.dp)
    model = Decoder(config, mine, device) if decodes else ImageEncoder(config, mine, device)
    side = Side(model, config, mine)
    spec = TensorSpec(shape=(len(share) * config.num_patches, batch.hidden_size), dtype=batch.dtype, device=device)
    plan = plan_pipeline(config.pipeline.build(1), 2, config.micro_batches)
    curve: list[float] = []
    for step in range(config.steps):
        losses = [torch.zeros((), dtype=config.torch_dtype, device=device)]

        def forward(microbatch: int, hidden: Tensor | None, step: int = step, losses: list[Tensor] = losses) -> tuple[Tensor, None]:
            patches_BPC, classes_BP = (x[share.start : share.stop] for x in micro_batch(config, step, microbatch, device))
            if hidden is None:
                return model(patches_BPC), None
            loss = model(hidden, classes_BP)
            losses.append(loss.detach())
            return loss, None

        side.sync.zero_grad_buffer()
        run_schedule(plan, forward, link.stages, hidden=spec, no_sync=side.sync.no_sync, communicator=link)
        side.update()
        # Every tensor-parallel rank of the decoder has the same loss; one of each replica counts.
        total = torch.stack(losses).sum() * (decodes and mine.tp.is_first)
        curve.append(all_reduce(total, Group.of(_world())).item() / config.num_labels)
        if log_every and (step + 1) % log_every == 0 and rank == 0:
            print(f"step {step + 1:4}  loss {curve[-1]:.4f}", flush=True)
    return curve


def train_alone(config: JointConfig) -> list[float]:
    """Both models on one process; the curve that any two grids must give."""
    groups = ProcessGroups.single()
    encoder, decoder = ImageEncoder(config, groups, "cpu"), Decoder(config, groups, "cpu")
    sides = [Side(model, config, groups) for model in (encoder, decoder)]
    curve = []
    for step in range(config.steps):
        for side in sides:
            side.sync.zero_grad_buffer()
        total = 0.0
        for number in range(config.micro_batches):
            patches_BPC, classes_BP = micro_batch(config, step, number, "cpu")
            loss = decoder(encoder(patches_BPC), classes_BP)
            loss.backward()
            total += loss.item()
        for side in sides:
            side.update()
        curve.append(total / config.num_labels)
    return curve


def _sizes(layers: int, width: int, vocab: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=4, ffn_hidden_size=2 * width, vocab_size=vocab, init_method_std=0.1
    )


def _whole(plan: ParallelPlan) -> ParallelPlan:
    """Between the models every tensor-parallel rank holds all rows: the decoder puts its own beside them."""
    return ParallelPlan(tp=plan.tp, dp=plan.dp, sequence_parallel=False)


def _share(count: int, replicas: Group) -> range:
    """The sequences of this replica, as even as can be; as a ``BridgeBatch`` divides them."""
    return range(count * replicas.rank // replicas.size, count * (replicas.rank + 1) // replicas.size)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("python -m mcore_tools.joint", __doc__)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, for instance decoder.tp=1")
    add_fields_option(parser, JointConfig)
    try:
        config = override(JointConfig(), parser.parse_args(arguments).set)
    except ValueError as error:
        report_error(str(error))
        return exit_code(error)
    kind = "cuda" if torch.cuda.device_count() >= config.num_ranks else "cpu"
    print(f"encoder on {config.encoder.world_size} ranks, decoder on {config.decoder.world_size}; a guess costs", end=" ")
    print(f"{math.log(config.decoder_model.vocab_size):.4f}", flush=True)
    curve = launch(functools.partial(train_joint, config, kind, log_every=max(1, config.steps // 12)), config.num_ranks, device=kind)[0]
    print(f"loss {curve[0]:.4f} -> {curve[-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
