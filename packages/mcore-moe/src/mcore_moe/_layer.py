# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture of experts that fits a transformer layer's feed-forward slot."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mcore_moe._batch_invariant import check_batch_invariant
from mcore_moe._config import OF_FLEX, MoEConfig, check_experts
from mcore_moe._experts import GroupedMLP, TEGroupedMLP, experts_class
from mcore_moe._fp8_payload import rounded
from mcore_moe._fp8_stack import Fp8Stack
from mcore_moe._quantize import get_align_size_for_quantization
from mcore_moe._router import TopKRouter
from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api
from mcore_moe._tokens import LocalTokens
from mcore_moe.dispatch import (
    LocalTokenDispatcher,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    PlacedPicks,
    ReplicatedTokenDispatcher,
    TokenExchange,
    choose_exchange,
)
from mcore_moe.serving import ExpertPlacement, ExpertSlots, StreamedExperts
from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.backends import AlignedRows, BackendLayers, quantization
from mcore_parallel.comm import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from mcore_parallel.models import Aux, AuxSpec, FeedForwardBuilder, Site, TransformerConfig, dense_feed_forward
from mcore_parallel.nn import MLP, Activation, Step, recompute
from mcore_parallel.tensor_parallel import BatchInvariantProducts, ReplicatedLinear, each_row


@experimental_api
class MoELayer(nn.Module):
    """Router, exchange, experts, exchange back; beside it the shared experts, whose result is added. With ``moe_latent_size`` the tokens
    that travel, and the experts, are as narrow as that.

    The experts are as the model's dense feed-forward would be: its activation with offset and clamp, and its biases. Tensor-parallel
    ranks hold different tokens under sequence parallelism. Without, they hold the same: each computes the picks of its own experts, or,
    where experts are spread over further ranks, sends an equal share of the tokens there; the results are summed over them.

    Training forwards return an ``Aux`` with the losses of the router and the tokens of each expert; of tokens that several ranks hold,
    the first of them counts.

    Steps of ``equal_lengths`` gather the tokens of all ranks, whatever dispatcher the config names: nothing waits for the device then.

    Args:
        config: the mixture.
        site: where in the model it stands.
        dtype: of the parameters.
        pause: called while tokens travel (``mcore_parallel.pipeline.Overlap.pause``); None waits for them.
        exchange: of ``mcore_moe.dispatch.choose_exchange``, for "flex"; layers may share one, and so its buffers. None for one of the
            layer's own.
        fp8_input_store: keep the input of the activation, of the experts and of the shared ones, for the backward in fp8.

    Raises:
        ValueError: ep does not divide the experts, or etp their width; a backend that does not multiply experts; padding for quantisation
            without a recipe; ``pause`` with another exchange than all-to-all; recomputed parts that the mixture or the backend has not;
            ``fp8_input_store`` with a recomputed activation or a batch-invariant backend.
    """

    def __init__(
        self,
        config: MoEConfig,
        site: Site,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pause: Callable[[], None] | None = None,
        exchange: TokenExchange | None = None,
        fp8_input_store: bool = False,
    ) -> None:
        super().__init__()
        _check_pause(config, pause)
        if site.batch_invariant:
            _check_kept_inputs(fp8_input_store)
        groups = site.groups
        self.layer = site.layer
        check_experts(config, site.config, groups.plan, dtype=dtype, device=device)
        hidden_size = site.config.hidden_size
        biased = site.config.add_bias_linear
        exact = site.batch_invariant
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.router = TopKRouter(config, hidden_size, groups, layer=site.layer, bias=biased, batch_invariant=exact, **place)
        # Ranks that hold the same tokens, and sum their parts of the result.
        self.replicas = self.router.replicas
        if exchange is None and config.moe_token_dispatcher_type == "flex" and _exchanges(groups):
            exchange = _choose(config, site)
        self._groups = groups
        self._take_dispatchers(config.num_moe_experts, pause, exchange)
        self.expert_slots: ExpertSlots | None = None
        """Where the experts lie since ``add_redundant_experts``."""
        self._shares_tokens = self.replicas.size > 1 and _exchanges(groups)
        activation = Activation(
            name=site.config.activation,
            offset=site.config.glu_linear_offset,
            clamp=site.config.activation_func_clamp_value,
            batch_invariant=exact,
            fp8_input_store=fp8_input_store,
        )
        self._multiple = _row_multiple(config, site)
        self.experts: GroupedMLP | TEGroupedMLP = experts_class(site.layers, groups)(
            config.num_moe_experts,
            config.moe_latent_size or hidden_size,
            config.moe_ffn_hidden_size or site.config.ffn_size,
            groups,
            activation=activation,
            bias=site.config.add_bias_linear,
            memory=site.memory,
            layers=site.layers,
            **place,
        )
        place["init"] = False
        self.latent_down, self.latent_up = None, None
        if config.moe_latent_size is not None:
            self.latent_down = _replicated(hidden_size, config.moe_latent_size, site, **place)
            self.latent_up = _replicated(config.moe_latent_size, hidden_size, site, **place)
        self.shared_experts, self.shared_expert_gate = None, None
        if config.moe_shared_expert_intermediate_size is not None:
            size = config.moe_shared_expert_intermediate_size
            self.shared_experts = MLP(hidden_size, size, groups, activation=activation, layers=site.layers, **place)
            self.shared_expert_gate = _replicated(hidden_size, 1, site, **place) if config.moe_shared_expert_gate else None
        self._memory = site.memory
        if "shared_experts" in site.memory.recomputed and self.shared_experts is None:
            raise ValueError(
                "recompute.modules holds 'shared_experts', and moe_shared_expert_intermediate_size=None; leave it out, or set a width"
            )

    @property
    def drops_tokens(self) -> bool:
        """Whether a token's result depends on those beside it: an expert takes no more than its capacity, outside training too."""
        return self.router.config.moe_expert_capacity_factor is not None

    @property
    def routes_at_random(self) -> bool:
        """Whether every call chooses experts at random, outside training too: equal tokens get other results."""
        return self.router.config.moe_router_force_load_balancing

    @property
    def reads_device(self) -> bool:
        """Whether a forward without gradients, of a step of ``equal_lengths``, waits for the device, to know how many rows an expert has:
        then no graph holds it."""
        experts = self.experts
        on_device = experts.dtype == torch.bfloat16 or experts.is_batch_invariant
        return not (isinstance(experts, GroupedMLP) and experts.up.is_cuda and on_device)

    def graph_obstacle(self) -> str | None:
        """As ``mcore_parallel.graphs.GraphChecked``: a forward or backward that waits for the device, or runs more than kernels."""
        config, dispatcher, experts = self.router.config, self.dispatcher, self.experts
        if isinstance(dispatcher, MoEFlexTokenDispatcher):
            backend = config.moe_flex_dispatcher_backend
            if backend != "symmetric":
                return (
                    f"moe_flex_dispatcher_backend={backend!r} sizes its exchanges on the host; set it to 'symmetric', or "
                    "moe_token_dispatcher_type='alltoall' and moe_pad_expert_input_to_capacity=True"
                )
            if config.moe_symmetric_exact_rows:
                return "moe_symmetric_exact_rows=True reads the number of rows on the host; leave it out"
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher) and dispatcher.pause is not None:
            return "pause lets another micro-batch run on the host while tokens travel; leave it out"
        exchanges = isinstance(dispatcher, MoEAlltoAllTokenDispatcher | MoEAllGatherTokenDispatcher)
        if exchanges and not config.moe_pad_expert_input_to_capacity:
            return (
                f"moe_token_dispatcher_type={config.moe_token_dispatcher_type!r} reads the sizes of its exchange on the host; set "
                "moe_expert_capacity_factor and moe_pad_expert_input_to_capacity=True"
            )
        if not isinstance(experts, GroupedMLP):
            return f"{type(experts).__name__} reads the rows of each expert on the host; build the model with backend=None"
        if experts.up.is_cuda and experts.dtype != torch.bfloat16:
            return f"experts in {experts.dtype} are multiplied one by one, in sizes that the host reads; build the model in bfloat16"
        return None

    def fp8_obstacle(self) -> str | None:
        """Why an engine cannot keep the experts' weights in fp8; None where it can, or does."""
        return self.experts.fp8_obstacle()

    def store_in_fp8(self, *, multiply: bool) -> None:
        """Round the experts' weights to e4m3, in place (`GroupedMLP.store_in_fp8`). Router, latent projections and the gate of shared
        experts stay as they are; shared experts are linear layers."""
        self.experts.store_in_fp8(multiply=multiply)

    def fp8_weights(self) -> Mapping[nn.Parameter, Fp8Stack]:
        """The experts' parameters that are in fp8, with their scales."""
        return {getattr(self.experts, name): stack for name, stack in self.experts.fp8.items()}

    def check_redundant_experts(self, num_redundant_experts: int) -> None:
        """Whether ``add_redundant_experts`` takes this number here; nothing changes.

        Raises:
            ValueError: as of ``add_redundant_experts``.
        """
        config, groups = self.router.config, self._groups
        if self.expert_slots is not None:
            if self.expert_slots.num_slots != config.num_moe_experts + num_redundant_experts:
                has = self.expert_slots.num_slots - config.num_moe_experts
                raise ValueError(f"num_redundant_experts={num_redundant_experts}, and the model has {has} already; build another model")
            return
        if groups.ep.size == 1:
            raise ValueError(
                f"num_redundant_experts={num_redundant_experts} copies experts to other ranks, and with ep=1 each rank holds all; serve "
                "with ep of 2 and more, or leave it out"
            )
        if self.drops_tokens or isinstance(self.dispatcher, MoEFlexTokenDispatcher):
            field, remedy = ("moe_expert_capacity_factor", "None") if self.drops_tokens else ("moe_token_dispatcher_type", "'alltoall'")
            raise ValueError(
                f"num_redundant_experts={num_redundant_experts}, and {field}={getattr(config, field)!r} counts on one place an expert; "
                f"set {field}={remedy}"
            )
        ExpertPlacement.home(config.num_moe_experts, groups.ep.size, num_redundant_experts)
        self.experts.check_slots()

    def add_redundant_experts(self, num_redundant_experts: int) -> ExpertSlots:
        """Let ranks hold copies of experts beside their own, and any experts in any order; an engine moves them by their loads.

        Parameters are the first slots of a rank: they hold its experts when this is called and after weights were written to all of them
        (`ExpertSlots.weights_changed`), and others once experts have moved. There is no training then.

        Args:
            num_redundant_experts: copies over all ranks, a multiple of ep; 0 for experts that move only.

        Returns:
            The slots, those of an earlier call with the same number too.

        Raises:
            ValueError: no other rank holds experts, numbers that ep does not divide, more copies than ranks to hold them, a capacity, a
                flex dispatcher, or experts that are trained or multiplied by something else.
        """
        self.check_redundant_experts(num_redundant_experts)
        config, groups = self.router.config, self._groups
        if self.expert_slots is not None:
            return self.expert_slots
        home = ExpertPlacement.home(config.num_moe_experts, groups.ep.size, num_redundant_experts)
        weights = self.experts.add_slots(len(home.experts_GS[0]))
        self.expert_slots = ExpertSlots(weights, home, groups.ep, groups.dp.rank)
        self._take_dispatchers(self.expert_slots.num_slots, None, None)
        return self.expert_slots

    def streamed(self) -> StreamedExperts | None:
        """As of ``mcore_parallel.nn.StreamsFeedForward``: of a mixture alone, on a rank that holds all of it."""
        alone = self.shared_experts is None and self.latent_down is None and isinstance(self.dispatcher, LocalTokenDispatcher)
        experts = self.experts
        # Its kernels read the tokens as they are.
        alone = alone and self.router.config.moe_dispatch_fwd_dtype is None
        if not alone or type(self.router) is not TopKRouter or not isinstance(experts, GroupedMLP):
            return None
        return StreamedExperts(self.router, experts) if StreamedExperts.fits(self.router, experts) else None

    def forward(self, x_TD: Tensor, step: Step) -> tuple[Tensor, Aux | None]:
        """[T, D] -> ([T, D], losses and counts; None outside training)."""
        slots = self.expert_slots
        if slots is not None and (not slots.is_settled or (self.training and torch.is_grad_enabled())):
            state = "are not in their slots after new weights: its engine brings them there" if not slots.is_settled else "are not trained"
            raise RuntimeError(f"layers.{self.layer} has redundant experts, which {state}; run the model by its engine")
        if (self.training or torch.is_grad_enabled()) and (self.shared_experts is not None or self.latent_down is not None):
            # Weight gradients multiply the rows of padding by 0, which infinite ones do not survive; the router leaves them out by itself.
            x_TD = LocalTokens.of(step, self._groups, len(x_TD)).masked(x_TD)
        dispatcher = self._equal_dispatcher if step.equal_lengths else self.dispatcher
        overlaps = self.router.config.moe_shared_expert_overlap and isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
        shared_TD = None if overlaps else self._shared(x_TD, step)
        routed_TD = copy_to_tensor_model_parallel_region(x_TD, self.replicas)
        routing, losses = self.router(routed_TD, step)
        counted = routing
        if self._shares_tokens:
            routing = routing.share(self.replicas.rank, self.replicas.size)
        if self.latent_down is not None:
            routed_TD = copy_to_tensor_model_parallel_region(self.latent_down(x_TD), self.replicas)
        if self.router.config.moe_apply_probs_on_input:
            routed_TD, routing = _weighted(routed_TD, routing)
        if slots is not None:
            routing = slots.assign(routing)
        if self.router.config.moe_dispatch_fwd_dtype == "fp8":
            routed_TD = rounded(routed_TD)
        if overlaps:
            computed: list[Tensor | None] = []
            sent = dispatcher.dispatch(routed_TD, routing, lambda: computed.append(self._shared(x_TD, step)))
            (shared_TD,) = computed
        elif self._gathers(dispatcher, routed_TD, routing):
            sent = dispatcher.place(routing)
        else:
            sent = dispatcher.dispatch(routed_TD, routing)
        if isinstance(sent, PlacedPicks):
            rows_RD = self.experts(routed_TD, sent.ends_N, sent.weights_R, sent)
        else:
            rows_RD = self._compute(sent.rows_RD, sent.ends_N, sent.weights_R)
        y_TD = reduce_from_tensor_model_parallel_region(dispatcher.combine(rows_RD, sent, routing), self.replicas)
        y_TD = y_TD if self.latent_up is None else self.latent_up(y_TD)
        y_TD = y_TD if shared_TD is None else y_TD + shared_TD
        if not (self.training and torch.is_grad_enabled()):
            return y_TD, None
        counts_E = counted.counts(self.router.config.num_moe_experts)
        counts_E = counts_E if self.replicas.is_first else torch.zeros_like(counts_E)
        return y_TD, Aux(losses={(self.layer, name): loss for name, loss in losses.items()}, counts={self.layer: counts_E})

    def end_of_batch(self, counts: Tensor, skipped: Tensor, step: int | None = None) -> None:
        """Move the bias of the selection by the loads of the global batch (``mcore_parallel.models.CountsHook``).

        Raises:
            ValueError: no step, and ``moe_router_bias_decay_steps`` asks for it.
        """
        self.router.update_expert_bias(counts, skipped, step)

    def _take_dispatchers(self, num_experts: int, pause: Callable[[], None] | None, exchange: TokenExchange | None) -> None:
        """For so many experts, or slots of experts, over all ranks."""
        config, groups = self.router.config, self._groups
        self.dispatcher: Any = _dispatcher(config, num_experts, groups, pause, exchange)
        # Of steps in which the ranks have equally many tokens: few, as a rule, of which one collective costs less than sorted rows.
        self._equal_dispatcher: Any = (
            MoEAllGatherTokenDispatcher(num_experts, groups, equal_lengths=True) if _exchanges(groups) else self.dispatcher
        )

    def _gathers(self, dispatcher: Any, x_TD: Tensor, routing: Routing) -> bool:
        """Whether experts take their rows from the tokens themselves."""
        plain = isinstance(dispatcher, LocalTokenDispatcher) and isinstance(self.experts, GroupedMLP) and self._multiple == 1
        return plain and routing.capacity is None and self.experts.gathers(x_TD, routing.experts_TK.numel())

    def _compute(self, rows_RD: Tensor, ends_N: Tensor, weights_R: Tensor | None) -> Tensor:
        if self._multiple == 1:
            return self.experts(rows_RD, ends_N, weights_R)
        aligned = AlignedRows.of(rows_RD, ends_N, weights_R, self._multiple)
        return aligned.take(self.experts(aligned.rows_SD, aligned.ends_N, aligned.weights_S))

    def _shared(self, x_TD: Tensor, step: Step) -> Tensor | None:
        if self.shared_experts is None:
            return None
        if "shared_experts" in self._memory.recomputed:
            return recompute(self._run_shared, x_TD, step, preserve_rng_state=self._memory.preserve_rng_state)
        return self._run_shared(x_TD, step)

    def _run_shared(self, x_TD: Tensor, step: Step) -> Tensor:
        assert self.shared_experts is not None
        y_TD, _ = self.shared_experts(x_TD, step)
        if self.shared_expert_gate is None:
            return y_TD
        logits_T1 = self.shared_expert_gate(x_TD)
        alone = self.router.batch_invariant and not logits_T1.is_cuda
        return (each_row(torch.sigmoid, logits_T1) if alone else logits_T1.sigmoid()) * y_TD


def _replicated(in_features: int, out_features: int, site: Site, **place: Any) -> ReplicatedLinear:
    products = BatchInvariantProducts() if site.batch_invariant else None
    return ReplicatedLinear(in_features, out_features, site.groups, products=products, **place)


def _dispatcher(
    config: MoEConfig, num_experts: int, groups: ProcessGroups, pause: Callable[[], None] | None, exchange: TokenExchange | None
) -> Any:
    if not _exchanges(groups):
        replicated = groups.tp.size > 1 and not groups.sequence_parallel
        return ReplicatedTokenDispatcher(num_experts, groups) if replicated else LocalTokenDispatcher(num_experts)
    if exchange is not None:
        return MoEFlexTokenDispatcher(num_experts, groups, exchange)
    if config.moe_token_dispatcher_type == "allgather":
        return MoEAllGatherTokenDispatcher(num_experts, groups)
    return MoEAlltoAllTokenDispatcher(num_experts, groups.ep, groups.expt_tp, pause=pause, fp8=config.moe_dispatch_fwd_dtype == "fp8")


def _row_multiple(config: MoEConfig, site: Site) -> int:
    """Of which an expert's rows are a multiple; 1 for any number, as in the layers that a recipe leaves in bfloat16."""
    if not config.moe_router_padding_for_quantization:
        return 1
    if not isinstance(site.layers, BackendLayers):
        raise ValueError(
            "moe_router_padding_for_quantization=True needs a backend with an Fp8Config, found none; pass backend= to the model, or leave "
            "the padding out"
        )
    return max(1, get_align_size_for_quantization(quantization(site.layers)))


def _exchanges(groups: ProcessGroups) -> bool:
    """Whether tokens travel to other ranks: not where a rank holds all experts, or where those with the others hold the same tokens."""
    apart = groups.tp.size == 1 or groups.sequence_parallel or not set(groups.tp_ep.ranks) <= set(groups.tp.ranks)
    return groups.ep.size * groups.expt_tp.size > 1 and apart


def _choose(config: MoEConfig, site: Site) -> TokenExchange | None:
    width = config.moe_latent_size or site.config.hidden_size
    return choose_exchange(config, site.groups, width=width, dtype=site.dtype, device=site.device)


def _by_all_to_all(config: MoEConfig) -> MoEConfig:
    """The mixture after flex fell back."""
    return dataclasses.replace(config, moe_token_dispatcher_type="alltoall", **{name: getattr(MoEConfig, name) for name in OF_FLEX})


def _weighted(x_TD: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """Tokens times the weight of their only expert, and weights of 1."""
    probs_TK = routing.probs_TK
    return (x_TD * probs_TK).to(x_TD.dtype), dataclasses.replace(routing, probs_TK=torch.ones_like(probs_TK))


def _check_pause(config: MoEConfig, pause: Callable[[], None] | None) -> None:
    if pause is not None and config.moe_token_dispatcher_type != "alltoall":
        raise ValueError(
            f"pause overlaps all-to-alls, found moe_token_dispatcher_type={config.moe_token_dispatcher_type!r}; "
            "set it to 'alltoall', or leave pause out"
        )
    if pause is not None and config.moe_shared_expert_overlap:
        raise ValueError("pause and moe_shared_expert_overlap=True both work while tokens travel; leave one out")


def _check_kept_inputs(fp8_input_store: bool) -> None:
    """Of a batch-invariant backend."""
    if fp8_input_store:
        raise ValueError("fp8_input_store=True has no path beside batch_invariant=True of the backend; leave one out")


@experimental_api
def moe_feed_forward(config: MoEConfig, *, pause: Callable[[], None] | None = None, fp8_input_store: bool = False) -> FeedForwardBuilder:
    """A feed-forward builder for `GPTModel` that puts the mixture into every layer that ``moe_layer_freq`` names, a dense one elsewhere.

    With ``pause=overlap.pause`` the all-to-alls of one micro-batch hide behind the computation of another, in the pairs of
    ``combined_one_f_one_b``. With ``fp8_input_store`` all of them keep the input of the activation for the backward in fp8.

    A batch-invariant model refuses ``fp8_input_store``, on every pipeline stage.

    Raises:
        ValueError: ``pause`` with another ``moe_token_dispatcher_type`` than "alltoall".
    """
    _check_pause(config, pause)
    return _MixtureBuilder(config, pause, fp8_input_store)


@dataclass(frozen=True)
class _MixtureBuilder:
    """Builds a layer, says before (``mcore_parallel.models.LayoutChecked``) whether a layout can divide it, and what it reports."""

    config: MoEConfig
    pause: Callable[[], None] | None
    fp8_input_store: bool
    exchanges: dict[tuple[Group, torch.dtype, str], TokenExchange | None] = field(default_factory=dict, compare=False, repr=False)
    """Those of the groups that a layer was built for: layers share their buffers."""

    def __call__(self, site: Site) -> nn.Module:
        if not self._is_moe(site.layer, site.config):
            return dense_feed_forward(site, fp8_input_store=self.fp8_input_store)
        config, exchange = self.config, None
        if config.moe_token_dispatcher_type == "flex" and _exchanges(site.groups):
            exchange = self._exchange(site)
            config = config if exchange is not None else _by_all_to_all(config)
        options: dict[str, Any] = {"pause": self.pause, "exchange": exchange, "fp8_input_store": self.fp8_input_store}
        return MoELayer(config, site, dtype=site.dtype, device=site.device, **options)

    @property
    def noise_fields(self) -> str:
        """As ``mcore_parallel.nn.DrawsNoise``."""
        return self.config.noise_fields

    def check_layout(self, config: TransformerConfig, plan: ParallelPlan, *, dtype: torch.dtype, device: torch.device | str) -> None:
        check_experts(self.config, config, plan, dtype=dtype, device=device)

    def check_batch_invariant(
        self, config: TransformerConfig, plan: ParallelPlan, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """As ``mcore_parallel.models.BatchInvariantChecked``."""
        _check_kept_inputs(self.fp8_input_store)
        check_batch_invariant(self.config, plan, device=device)

    def aux_spec(self, layer: int, config: TransformerConfig) -> AuxSpec | None:
        if not self._is_moe(layer, config):
            return None
        reads = "global_aux_loss" in self.config.loss_coefficients
        return AuxSpec(losses=self.config.loss_names, num_counts=self.config.num_moe_experts, reads_counts=reads)

    def _exchange(self, site: Site) -> TokenExchange | None:
        key = (site.groups.tp_ep, site.dtype, str(site.device))
        if key not in self.exchanges:
            self.exchanges[key] = _choose(self.config, site)
        return self.exchanges[key]

    def _is_moe(self, layer: int, config: TransformerConfig) -> bool:
        """A pattern asks for experts where it has E, and nowhere else."""
        return config.hybrid_layer_pattern is not None or self.config.is_moe_layer(layer, config.num_layers)
