# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs the steps of an engine on the device; it never waits for results."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mcore_inference._capability import graph_obstacle, has_recurrent_layers, shares_experts
from mcore_inference._fields import as_flag, as_integer
from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraTable
from mcore_inference.attention import TableRows
from mcore_inference.context import DynamicInferenceContext, HostStep, StepInputs
from mcore_inference.decoder import FusedDecoder, TorchDecoder
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._decode_batch import DecodeBatch
from mcore_inference.engine._decode_graphs import DecodeGraphs, graph_sizes
from mcore_inference.engine._draft_graphs import DraftGraphs
from mcore_inference.engine._expert_balance import ExpertBalancing
from mcore_inference.engine._mixed_graphs import MixedGraphs, doubled_rows, mixed_sizes, proposal_sizes
from mcore_inference.engine._model_drafts import ModelDrafts
from mcore_inference.engine._pipeline import Pipeline
from mcore_inference.engine._prompt_scores import PromptScores
from mcore_inference.engine._recording_pool import RecordingPool
from mcore_inference.engine._routing import RoutingRecorder, StepRouting
from mcore_inference.engine._stage_message import check_drawn
from mcore_inference.engine._step_draws import BegunDraws, StepDraws
from mcore_inference.sampling import Draws, PackedDraws, PlainSums
from mcore_inference.scheduling import Work
from mcore_inference.speculation import EagleSpeculation, MtpSpeculation, NgramSpeculation
from mcore_parallel.backends import TorchBackend
from mcore_parallel.comm import all_gather
from mcore_parallel.models import GPTModel, ModelOutput
from mcore_parallel.nn import Step

_LOG = logging.getLogger("mcore_inference.engine")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How an engine drives the device. The tokens do not depend on it, as far as the logits do not: in float64, or with a batch-invariant
    backend; in fewer bits the last ones change with the kernels and the size of a step, and now and then a token.

    Raises:
        ValueError: a field is of another type or out of its range, or two exclude each other; names them.
    """

    run_ahead: bool | None = None
    """Read a step's results while the device computes the next; None for where there is a GPU. Over the stages of a pipeline that share no
    experts as many batches of requests are in flight as there are stages, each in a step of its own, unless it is False."""
    use_graphs: bool | None = None
    """Replay decode steps as CUDA graphs; None for where the model and the device can."""
    num_cuda_graphs: int | None = None
    """Numbers of rows that are recorded, each half of the next, up to ``max_requests``: few take less memory and time to record, and pad
    more. None for about 25, close together where few rows are served. Refused where no step is recorded."""
    use_cuda_graphs_for_non_decode_steps: bool | None = None
    """Replay steps with prompts of at most 2048 tokens as graphs too, filled up to 2048, 1024, 512, 256 or 128: the host launches so few
    tokens more slowly than the device computes them; and full steps, of 7/8 of ``max_tokens`` and more, where that is at most 8192. Takes
    the memory of at most twelve more recordings. None for where decode steps are recorded and the model can."""
    log_interval_steps: int | None = None
    """Steps of one line of JSON in the logger ``mcore_inference.steps``; None for no lines."""
    speculation: NgramSpeculation | MtpSpeculation | EagleSpeculation | None = None
    """Verify several proposed tokens a step; None for one token a step. Excludes ``run_ahead``."""
    record_routing: bool = False
    """Keep the experts that each token went to (``record.routed_experts``), for a trainer that replays them."""
    expert_balancing: ExpertBalancing | None = None
    """Move the experts of a mixture between the ranks that share them (ep) by their loads, and copy the busiest; None leaves each where
    it is."""

    def __post_init__(self) -> None:
        as_flag("record_routing", self.record_routing)
        for name in ("run_ahead", "use_graphs", "use_cuda_graphs_for_non_decode_steps"):
            if getattr(self, name) is not None:
                as_flag(name, getattr(self, name))
        if self.log_interval_steps is not None:
            as_integer("log_interval_steps", self.log_interval_steps, 1, 2**31)
        if self.num_cuda_graphs is not None:
            as_integer("num_cuda_graphs", self.num_cuda_graphs, 1, 2**31)
            if self.use_graphs is False:
                raise ValueError(f"num_cuda_graphs={self.num_cuda_graphs} and use_graphs=False exclude each other; leave one at None")
        if self.use_cuda_graphs_for_non_decode_steps and self.use_graphs is False:
            raise ValueError("use_cuda_graphs_for_non_decode_steps=True and use_graphs=False exclude each other; leave one out")
        if self.expert_balancing is not None and not isinstance(self.expert_balancing, ExpertBalancing):
            raise ValueError(f"expert_balancing is a {type(self.expert_balancing).__name__}; give ExpertBalancing(...), or None")
        if self.speculation is not None and not isinstance(self.speculation, (NgramSpeculation, MtpSpeculation, EagleSpeculation)):
            raise ValueError(
                f"speculation is a {type(self.speculation).__name__}; give NgramSpeculation, MtpSpeculation or EagleSpeculation, or None"
            )
        if self.speculation is not None and self.run_ahead:
            raise ValueError(
                "run_ahead=True and speculation exclude each other: proposals follow from the tokens drawn last; leave it at None"
            )


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A step that the device computes, and whose results the host has not read."""

    entries: Sequence[ActiveRequest]
    """Of the step."""
    sampled: list[ActiveRequest]
    draws: Draws | PackedDraws | None
    prompt_scores: Sequence[PromptScores]
    computed: list[ActiveRequest]
    """Requests without a budget whose prompt is computed now."""
    drafts: list[list[int]] | None = None
    """Of each request in ``sampled`` the tokens that its further draws assume; None where each has one draw."""
    routing: StepRouting | None = None
    """Experts of its tokens, where they are recorded."""

    def wait(self) -> list[tuple[int, float, dict[int, float]]]:
        """What ``Draws.wait`` gives, when the requests have the log-probabilities of their prompts and their experts.

        Raises:
            RuntimeError: the last stage could not draw.
        """
        draws = [] if self.draws is None else self.draws.wait()
        check_drawn(draws, self.prompt_scores)
        for scores in self.prompt_scores:
            scores.hand_out()
        if self.routing is not None:
            self.routing.hand_out()
        return draws


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that the stages compute, and whose tokens are on their way: its requests do not go on yet."""

    entries: Sequence[ActiveRequest]
    """Of the step."""
    sampled: list[ActiveRequest]
    draws: BegunDraws
    drafts: list[list[int]]
    """Of each request in ``sampled``."""
    computed: list[ActiveRequest]
    """As of ``InFlight``."""
    routing: StepRouting | None


class Executor:
    """The model, its cache and its sampler.

    Args:
        model: with a paged attention core.
        context: made for it.
        vocab_size: ids that exist.
        execution: how the device is driven.
        prepare: changes the model and the context for this engine, and returns its adapters; called when nothing more is refused.

    Raises:
        ValueError: graphs, speculation or records are asked for where they cannot be; ``prepare`` was not called then, unless it raised.
    """

    def __init__(
        self,
        model: GPTModel,
        context: DynamicInferenceContext,
        vocab_size: int,
        execution: ExecutionConfig,
        prepare: Callable[[], LoraTable | None],
    ) -> None:
        self._model, self._context = model, context
        self.num_computed = 0
        """Tokens that went through the model."""
        self.num_forwards_begun = self.num_forwards = 0
        """Passes through the model that began, and that ended."""
        self._batch_invariant = isinstance(model.backend, TorchBackend) and model.backend.batch_invariant
        self._pipeline = Pipeline(model) if model.groups.pp.size > 1 else None
        self.draws = StepDraws(context, vocab_size, self._pipeline, batch_invariant=self._batch_invariant)
        self._shares_experts = shares_experts(model)
        self.agreed_rows: int | None = None
        """Of ranks that share experts, rows of the recording that all replay in this step; None for a step without one."""
        obstacle = self._graph_obstacle()
        if execution.use_graphs and obstacle is not None:
            raise ValueError(f"use_graphs=True: {obstacle}; or leave it at None")
        if execution.num_cuda_graphs is not None and obstacle is not None:
            raise ValueError(f"num_cuda_graphs={execution.num_cuda_graphs}: {obstacle}; or leave it at None")
        if obstacle is not None and context.device.type == "cuda" and execution.use_graphs is None:
            _LOG.warning("steps are launched kernel by kernel, without CUDA graphs: %s", obstacle)
        if execution.speculation is not None and has_recurrent_layers(model):
            raise ValueError("speculation takes rejected tokens back, which recurrent states cannot; leave it at None for this model")
        if self._shares_experts and isinstance(execution.speculation, MtpSpeculation):
            raise ValueError(
                f"MtpSpeculation runs the experts of its heads at times of its own, and ep={model.groups.ep.size} etp="
                f"{model.groups.expt_tp.size} share experts with ranks that do not; leave speculation at None, or NgramSpeculation"
            )
        self.is_warm = False
        """No step compiles or records any more."""
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.proposal_graphs: MixedGraphs | None = None
        self._recordings = RecordingPool()
        speculation = execution.speculation
        rows, num_tokens = doubled_rows(context.max_requests, execution.num_cuda_graphs), None
        records = obstacle is None and execution.use_graphs is not False
        mixed_obstacle = obstacle or self._mixed_obstacle()
        records_mixed = records and mixed_obstacle is None
        self.drafts: ModelDrafts | None = None
        """Heads that propose tokens."""
        if isinstance(speculation, NgramSpeculation):
            num_tokens = speculation.num_tokens
        elif speculation is not None:
            self.drafts = ModelDrafts(model, context, speculation, vocab_size, (rows, self._recordings) if records_mixed else None)
            num_tokens = self.drafts.num_tokens
        modules = () if self.drafts is None else self.drafts.modules
        # Its kernels choose their way by the rows of a step.
        fits = context.builder.has_kernel and not self._batch_invariant
        fits = fits and FusedDecoder.fits(model, modules, context.config.weight_dtype)
        if context.config.use_flashinfer_fused_rope and (self.drafts is not None or not fits):
            raise ValueError(
                "use_flashinfer_fused_rope=True turns heads behind the projection, and a forward of the model or of draft heads turns them "
                "itself; leave it at None"
            )
        self._recorder = RoutingRecorder(model, context.max_tokens, context.device) if execution.record_routing else None
        records_prompts = execution.use_cuda_graphs_for_non_decode_steps
        if records_prompts and mixed_obstacle is not None:
            raise ValueError(f"use_cuda_graphs_for_non_decode_steps=True: {mixed_obstacle}; or leave it at None")
        self._adapters = prepare()
        # Here, since its package is that of training.
        from mcore_parallel.training.distill import HiddenCapture

        self._capture = HiddenCapture(model, modules)
        self._decoder: FusedDecoder | TorchDecoder | None = None
        if fits:
            self._decoder = FusedDecoder(
                model,
                context.max_requests,
                num_positions=context.max_blocks_per_request * context.block_size,
                records_routing=execution.record_routing,
                modules=modules,
            )
        elif not self._batch_invariant and TorchDecoder.fits(model, modules):
            self._decoder = TorchDecoder(model, modules=modules)
        if records:
            sizes = graph_sizes(context.max_requests, execution.num_cuda_graphs)
            self.graphs = DecodeGraphs(self._decode_logits, context.builder, sizes, self._recordings, is_shared=self._shares_experts)
        if records_mixed and records_prompts is not False:
            limits = (context.max_requests, context.max_tokens, context.max_sequence_length)
            sizes = mixed_sizes(*limits, has_states=context.states is not None)
            self.mixed_graphs = MixedGraphs(self._model_logits, context.builder, sizes, self._recordings)
        self._verified = 0 if num_tokens is None else 1 + num_tokens
        """Tokens of a row that verifies as many proposals as there are; 0 without speculation."""
        if records_mixed and num_tokens is not None:
            sizes = proposal_sizes(rows, 1 + num_tokens, context.max_tokens)
            self.proposal_graphs = MixedGraphs(self._model_logits, context.builder, sizes, self._recordings, reads_all=True)

    def run(self, work: Sequence[tuple[ActiveRequest, Work]]) -> InFlight:
        """Run the model over planned tokens and draw where all known tokens are computed."""
        return self.receive(self.launch(work))

    def launch(self, work: Sequence[tuple[ActiveRequest, Work]]) -> Launched:
        """Run the model over planned tokens, and draw on the rank that has the logits."""
        context = self._context
        tokens = []
        for entry, item in work:
            context.extend(item.request_id, item.num_tokens + len(entry.drafts))
            known = entry.tokens(context.num_cached(item.request_id), item.num_tokens)
            tokens.append((item.request_id, [*known, *entry.drafts] if entry.drafts else known))
        # Only rows that are read go through the gather and the softmax.
        rows: list[int] = []
        prompt_rows: list[tuple[ActiveRequest, int, list[int]]] = []
        sampled: list[tuple[ActiveRequest, range]] = []
        computed: list[ActiveRequest] = []
        end = 0
        for entry, item in work:
            start, end = end, end + item.num_tokens + len(entry.drafts)
            cached = context.num_cached(item.request_id)
            targets = entry.segment.prompt_tokens[cached + 1 : cached + item.num_tokens + 1] if entry.wants_prompt_log_probs else []
            if targets:
                prompt_rows.append((entry, len(rows), targets))
                rows += range(start, start + len(targets))
            if item.is_last and entry.segment.num_tokens_to_generate:
                first = end - 1 - len(entry.drafts)
                sampled.append((entry, range(len(rows), len(rows) + end - first)))
                rows += range(first, end)
            elif item.is_last:
                computed.append(entry)
        host, entries = context.host_step(tokens), [entry for entry, _ in work]
        logits_NV = self._forward(host, rows)
        if self.drafts is not None:
            self.drafts.observe([(entry, item.num_tokens + len(entry.drafts)) for entry, item in work])
        routing = None if self._recorder is None else self._recorder.take(entries, host)
        for entry, item in work:
            context.advance(item.request_id, item.num_tokens)
            # Whoever reads these blocks is launched later, so they are written then.
            context.register(item.request_id, entry.keys)
            if context.num_cached(item.request_id) in entry.snapshot_ends:
                context.keep_states(item.request_id)
            entry.segment.finished_chunk_token_count = min(context.num_cached(item.request_id), len(entry.segment.prompt_tokens))
        draws, drafts = self.draws.begin(logits_NV, sampled, prompt_rows), [entry.drafts for entry, _ in sampled]
        for entry, _ in sampled:
            entry.drafts = []
        drawing = [entry for entry, _ in sampled]
        return Launched(entries=entries, sampled=drawing, draws=draws, drafts=drafts, computed=computed, routing=routing)

    def receive(self, step: Launched) -> InFlight:
        """Let the requests of a step go on, with the tokens that another stage may have drawn."""
        results = self.draws.end(step.draws)
        for entry in step.sampled:
            entry.num_pending += 1
        return InFlight(
            entries=step.entries,
            sampled=step.sampled,
            draws=results.draws,
            prompt_scores=results.prompt_scores,
            computed=step.computed,
            drafts=step.drafts if any(step.drafts) else None,
            routing=step.routing,
        )

    def set_last_tokens(self, tokens: Mapping[int, int]) -> None:
        """Of these requests, the token that the next step begins with: the draws of a step with proposals left any of theirs."""
        send = self._context.builder.send
        self.draws.sampler.last_tokens[send([self._context.line(number) for number in tokens])] = send(list(tokens.values()))

    def batch(self, entries: list[ActiveRequest]) -> DecodeBatch:
        """Requests that draw a token in each of the steps that follow."""
        return self.draws.batch(entries, is_invariant=self._batch_invariant)

    def decode(self, batch: DecodeBatch) -> InFlight:
        """One token for each request of the batch; ``extend_lines`` made room for it."""
        host = dataclasses.replace(self._context.decode_step(batch.lines_R), contexts=batch.contexts)
        if self.draws.sampler.draws_plainly and self._recorded_rows(host) is not None:
            host = dataclasses.replace(host, draws=batch.plain)
        logits_RV = self._forward(host, range(len(batch.entries)))
        routing = None if self._recorder is None else self._recorder.take(batch.entries, host)
        if host.draws is not None:
            draws = self.draws.sampler.take(len(batch.entries), wants_log_probs=host.draws.wants_log_probs)
        else:
            draws = self.draws.end(self.draws.begin_batch(logits_RV, batch)).draws
        self._context.advance_lines(batch.lines_R)
        batch.advance()
        return InFlight(entries=batch.entries, sampled=batch.entries, draws=draws, prompt_scores=[], computed=[], routing=routing)

    def _forward(self, host: HostStep, rows: Sequence[int]) -> Tensor | None:
        """One pass through the model, counted, as of ``_logits``: ranks that share experts make as many."""
        self.num_forwards_begun += 1
        logits = self._logits(host, rows)
        self.num_forwards += 1
        return logits

    def _logits(self, host: HostStep, rows: Sequence[int]) -> Tensor | None:
        """Logits [N, V] of these tokens of the step, over the whole vocabulary on every tp rank; None where another stage has them."""
        num_tokens, builder = len(host.tokens_T), self._context.builder
        self.num_computed += num_tokens
        if self.graphs is not None and (size := self._recorded_rows(host)) is not None:
            logits_RV = self.graphs.run(host, size)
            return logits_RV if len(rows) == num_tokens else logits_RV[builder.send(rows)]
        # Without proposals few logits are read; recordings for proposals compute all.
        wide = (self.proposal_graphs, self.mixed_graphs)
        for graphs in wide if len(rows) > len(host.lengths_R) else wide[::-1]:
            if graphs is not None and num_tokens != len(host.lengths_R):
                logits_NV = graphs.run(host, rows)
                if logits_NV is not None:
                    return logits_NV
        return self._launched_logits(host, rows)

    def _recorded_rows(self, host: HostStep) -> int | None:
        """Rows of the recording that computes a step of one token a row; None for another step, and where none does."""
        if self.graphs is None or len(host.tokens_T) != len(host.lengths_R) or (self._shares_experts and self.agreed_rows is None):
            return None
        return self.graphs.padded(len(host.lengths_R)) if self.agreed_rows is None else self.agreed_rows

    @property
    def has_broken_pass(self) -> bool:
        """Whether a pass through the stages ended half-way here, so that this rank computes no other."""
        return self._pipeline is not None and self._pipeline.is_broken

    def _launched_logits(self, host: HostStep, rows: Sequence[int]) -> Tensor | None:
        """As ``_logits``, of a step that is launched kernel by kernel."""
        inputs, rows_N = self._context.builder.build(host), self._context.builder.send(rows)
        if self._pipeline is not None:
            with self._adapted(inputs):
                return self._pipeline.logits(inputs, rows_N)
        return self._model_logits(inputs, rows_N)

    def _adapted(self, inputs: StepInputs) -> contextlib.AbstractContextManager[None]:
        """In which the model computes the step with the adapters of its tokens."""
        if self._adapters is None or inputs.adapters_T is None:
            return contextlib.nullcontext()
        return self._adapters.applied(inputs.adapters_T)

    def run_padding(self) -> None:
        """The exchanges of a step of ``agreed_rows`` on a rank without work. Cache, counters and random numbers stay as they are."""
        assert self.graphs is not None and self.agreed_rows is not None, "ranks agree on rows where all of them have recordings"
        self.graphs.run_padding(self.agreed_rows)

    def _graph_obstacle(self) -> str | None:
        """Why no decode step is recorded, and the remedy; None where they are."""
        context = self._context
        if not context.builder.has_kernel:
            if (backend := context.cache.attention_backend) is not None:
                return f'PagedAttention(backend="{backend}") gathers keys and values by host indices here; leave backend at None'
            return (
                "graphs need a GPU, blocks of a multiple of 16 tokens, a dtype of 16 or 32 bits, and heads, latents and states of sizes "
                "that have kernels"
            )
        if self._shares_experts and not context.memory.keeps_addresses:
            return "ranks that share experts record together, and this cache moves when it is suspended; use a GPU with NVIDIA's driver"
        return graph_obstacle(self._model)

    def _decode_logits(self, inputs: StepInputs) -> Tensor:
        """Logits [R, V] of a step of one token a row, behind which plain draws are made."""
        if self._shares_experts:
            inputs = dataclasses.replace(inputs, step=_of_equal_lengths(inputs.step))
        sampler, decoder = self.draws.sampler, self._decoder
        sums, draws = None, inputs.draws if sampler.draws_plainly else None
        streams = isinstance(decoder, FusedDecoder) and inputs.adapters_T is None and decoder.sums_parts(len(inputs.tokens_T))
        if draws is not None and streams:
            sums = sampler.plain_sums(draws, self._model.config.vocab_size)
        logits_RV = self._model_logits(inputs, None, sums)
        if draws is not None:
            sampler.draw_plain(logits_RV, draws, sums)
        return logits_RV

    def _mixed_obstacle(self) -> str | None:
        """Why steps with rows of several tokens are not recorded though others are, and the remedy; None where they can be."""
        cache = self._context.cache
        if self._shares_experts:
            return (
                "ranks that share experts agree on sizes of decode steps alone; serve the experts of a model on the tp ranks of each engine"
            )
        if cache.attention_backend not in (None, "triton"):
            return f'PagedAttention(backend="{cache.attention_backend}") takes no rows of padding between prompts; leave backend at None'
        return None

    def _model_logits(self, inputs: StepInputs, rows_N: Tensor | None, sums: PlainSums | None = None) -> Tensor:
        """Logits [N, V] of these tokens of a step, or [T, V] of all; heads have their states then.

        Args:
            inputs, rows_N: of the step.
            sums: that the decoder fills in for its draws; only where it ``sums_parts``.
        """
        step = inputs.step if self._recorder is None else dataclasses.replace(inputs.step, routing_recorder=self._recorder)
        with self._adapted(inputs):
            logits_NV, states = self._computed(inputs.tokens_T, step, rows_N, sums)
        if self.drafts is not None:
            self.drafts.take_states(states)
        return logits_NV

    def _computed(self, tokens_T: Tensor, step: Step, rows_N: Tensor | None, sums: PlainSums | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The logits, and the states that heads read."""
        decoder = self._decoder
        if sums is not None:
            assert isinstance(decoder, FusedDecoder), "nobody else fills them in"
            return decoder.logits(tokens_T, step, rows_N, sums), decoder.take_states()
        if decoder is not None and (not isinstance(decoder, TorchDecoder) or decoder.as_made):
            return decoder.logits(tokens_T, step, rows_N), decoder.take_states()
        with self._capture:
            output, _ = self._model(tokens_T, step)
            states = self._capture.take()
        assert isinstance(output, ModelOutput)
        return all_gather(output.logits(rows_N), self._model.groups.tp, dim=1), states

    @property
    def num_graph_steps(self) -> int:
        """Steps that replayed a recording."""
        mixed = [graphs.step_counts.total() for graphs in (self.mixed_graphs, self.proposal_graphs) if graphs is not None]
        return sum(mixed) + (0 if self.graphs is None else self.graphs.request_counts.total())

    def record_graphs(self) -> None:
        """Record every size, the largest first: smaller ones lie in its memory.

        Raises:
            ValueError: nothing is recorded here.
        """
        if self.graphs is None:
            why = self._graph_obstacle() or "use_graphs=False excludes them; change ExecutionConfig"
            raise ValueError(f"this engine records no steps: {why}")
        for graphs in self._all_graphs():
            graphs.record_all()

    def warm_up(self) -> None:
        """Record what can be, compile the kernels of steps with long prompts, of those that verify proposals and of draws, and take the
        memory of the largest step.

        No request may run: their lines are used.
        """
        if self.graphs is not None:
            self.record_graphs()
        context, builder = self._context, self._context.builder
        most = min(context.max_tokens, context.max_sequence_length)
        # The largest step, the rest of a prompt, and one beside requests that decode, whose number says into how many parts their contexts
        # are cut.
        begun, prompts = min(builder.block_size, most - 1), min(context.max_tokens // most, context.max_requests)
        steps = [([most] * prompts, [0] * prompts), ([most - begun], [begun])]
        num_decode = 1
        while num_decode < min(context.max_requests, most):
            steps.append(([1] * num_decode + [most - num_decode], [begun] * num_decode + [0]))
            num_decode *= 2
        behind = min(builder.block_size, context.max_sequence_length - self._verified)
        if self._verified and behind > 0:
            counts = doubled_rows(context.max_requests)
            steps += [([self._verified] * count, [behind] * count) for count in counts if count * self._verified <= context.max_tokens]
        for lengths, cached in steps:
            host = builder.sink_step(lengths, cached)
            if host.adapters_R is not None and not self._shares_experts:
                # Those of the base take other kernels, where no rank waits for others that have no adapters.
                self._launched_logits(dataclasses.replace(host, adapters_R=None), range(len(lengths)))
            logits_NV = self._launched_logits(host, range(len(lengths)))
            if self.drafts is not None:
                self.drafts.warm_up(lengths, cached)
        self.draws.warm_up(logits_NV)
        self.is_warm = True

    def clear_graphs(self) -> None:
        """Forget all recordings: the cache moves, or its memory is given back."""
        self.is_warm = False
        for graphs in self._all_graphs():
            graphs.clear()
        self._recordings.clear()

    def _all_graphs(self) -> list[DecodeGraphs | MixedGraphs | DraftGraphs]:
        """Those with the largest steps first."""
        drafts = None if self.drafts is None else self.drafts.graphs
        return [graphs for graphs in (self.mixed_graphs, self.proposal_graphs, self.graphs, drafts) if graphs is not None]


def _of_equal_lengths(step: Step) -> Step:
    """A step of as many rows as the other ranks have, whose padding goes to no expert."""
    rows = step.attention.rows
    assert isinstance(rows, TableRows), "recorded steps run by the kernels"
    return dataclasses.replace(step, equal_lengths=True, valid=rows.contexts_R > 0)
