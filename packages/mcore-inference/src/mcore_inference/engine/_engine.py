# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine: continuous batching of requests over one model."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api, internal_api
from mcore_inference.adapters import LoraWeights
from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._assembly import assemble
from mcore_inference.engine._engine_cache import EngineCache
from mcore_inference.engine._engine_figures import EngineFigures
from mcore_inference.engine._equal_ranks import refused_together
from mcore_inference.engine._executor import ExecutionConfig
from mcore_inference.engine._expert_moves import ExpertMoves
from mcore_inference.engine._expert_peers import ExpertPeers
from mcore_inference.engine._expert_votes import Vote
from mcore_inference.engine._offline import completions_of, loras_of, run_to_end, settings_of
from mcore_inference.engine._shared_steps import StepsTogether
from mcore_inference.engine._step_log import StepLog
from mcore_inference.engine._stream_text import StreamText
from mcore_inference.engine._weights import ModelWeights, WeightChunk, WeightPolicy, check_chunks, check_policy
from mcore_inference.requests import DynamicInferenceRequestRecord, FinishReason, Prompt, QueueFullError
from mcore_inference.sampling import SamplingParams
from mcore_inference.scheduling import InferenceBatchDimensions
from mcore_inference.text import Tokenizer
from mcore_parallel.models import GPTModel

__all__ = ["DynamicInferenceEngine"]


@experimental_api
class DynamicInferenceEngine:
    """Serves many requests at once: each step computes a token for every running request and a part of the waiting prompts.

    With tensor or pipeline parallelism every rank has an engine, made by all together, and makes the same calls in the same order;
    scheduling and sampling are functions of those calls, so the ranks stay in step and return equal tokens. Sizes and seeds that differ are
    refused. The last stage of a pipeline draws for the others.

    Data-parallel ranks that share the experts of a mixture (``ep`` of dp ranks, with tp and pp or without) have requests of their own.
    They step together: ``step`` waits until all of them call it, and a rank without requests runs a dummy step while another has some.
    ``generate`` is called on all as well, with as many prompts as each has, none included. None steps while one is suspended, or has other
    weights than the rest (by ``weight_version``).

    Args:
        model: built with ``attention_core=PagedAttention()``; its groups say the layout. With ``weight_dtype`` of the context its weights
            are rounded here, when nothing is refused any more; without, those of a model that was rounded before are refused.
        context: memory, made for this model. An engine that had it before can only be closed from now on.
        tokenizer: for text prompts, stop words, text output and the default termination id.
        seed: of requests that bring none; an integer of 64 bits.
        vocab_size: ids that exist; None for the tokenizer's, or the model's. Rows of the embedding beyond it are padding and never drawn.
        max_waiting_requests: length of the queue at which new requests are refused; None for no limit.
        execution: how the device is driven; None for the defaults.

    Raises:
        ValueError: the model has a part that the engine does not serve (``EngineCapability``), cannot be served in its layout, or does
            not fit the context, or the context has requests of another engine; an argument is of
            another type, or a number out of its range; sizes or seeds of the ranks
            differ.
        RankFailedError: another rank of the model, or of those that share its experts, refused its part; that one says why.
    """

    def __init__(
        self,
        model: GPTModel,
        context: DynamicInferenceContext,
        tokenizer: Tokenizer | None = None,
        *,
        seed: int = 0,
        vocab_size: int | None = None,
        max_waiting_requests: int | None = None,
        execution: ExecutionConfig | None = None,
    ) -> None:
        parts = assemble(
            model, context, tokenizer, execution, seed=seed, vocab_size=vocab_size, max_waiting_requests=max_waiting_requests
        )  # fmt: skip
        self.model = model
        self.context = context
        self.tokenizer = tokenizer
        self.vocab_size: int = parts.vocab_size
        self.weight_version = 0
        """Of the weights; 0 before the first ``load_weights``."""
        self._newest_version = 0
        self._owner, self._max_waiting = parts.owner, parts.max_waiting_requests
        self._intake, self._requests, self._admission = parts.intake, parts.requests, parts.admission
        self._loop, self._executor, self._verification = parts.loop, parts.executor, parts.verification
        self.finished_counts: Counter[str] = self._requests.end_counts.by_reason
        """Requests that ended, by reason; one whose text the tokenizer fails at is an error once somebody reads it."""
        self.weights: ModelWeights = parts.weights
        self._loras = parts.loras
        self.peers: ExpertPeers | None = parts.peers
        """Of ranks that share experts."""
        self._shared_steps, self._balance = parts.shared_steps, parts.balance
        self._moves = ExpertMoves(parts.balance, self._loop, self.weights)
        self._cache = EngineCache(context, self._loop, self._admission, self._executor)
        self._figures = EngineFigures(parts, context)
        if parts.log_interval_steps is not None:
            self._loop.log = StepLog(self.stats, parts.log_interval_steps)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> int:
        """Queue a request; everything that can be wrong with it is said here, before anything is allocated.

        Args:
            prompt: text (needs the tokenizer), or token ids: a sequence, or an int64 tensor [P].
            sampling_params: None for the defaults.
            request_id: None for the next free number.
            priority: lower numbers are admitted first and preempted last; equal ones by arrival.
            lora: name of a loaded adapter; None for the base model.

        Returns:
            The request's number.

        Raises:
            InvalidTokenError: the prompt is empty, no sequence of integers, or holds an id outside the vocabulary.
            UnknownLoraError: no such adapter is loaded.
            ContextOverflowError: (a subclass) the request never fits the context.
            QueueFullError: too many requests wait.
            StructuredOutputError: the form of the output is wrong, or not available here.
            ValueError: the number is in use or none, the priority is no integer of 32 bits, the settings are no ``SamplingParams``, or a
                setting needs a tokenizer or names an id outside the vocabulary.
            RuntimeError: another engine has the context.
        """
        self.context.check_owner(self._owner)
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is a {type(params).__name__}; give SamplingParams(...), or None for the defaults")
        if params.n > 1:
            raise ValueError(f"n={params.n} completions are as many requests; add one for each of its choices(), or use generate")
        if request_id is not None:
            request_id = as_integer("request_id", request_id, 0, 2**63 - 1)
        priority = as_integer("priority", priority, -(2**31), 2**31 - 1)
        number, order = self._requests.number(request_id)
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise QueueFullError(number, f"{self.num_waiting} requests wait and max_waiting_requests={self._max_waiting}; try again later")
        self._requests.add(self._intake.make(prompt, params, number=number, order=order, priority=priority, lora=lora))
        return number

    def get_request(self, request_id: int) -> DynamicInferenceRequestRecord:
        """The record of a request that has not ended, as it grows; its text is brought up to its tokens here.

        Raises:
            KeyError: no such request.
        """
        entry = self._requests.entries[request_id]
        entry.grow_text()
        return entry.record

    @property
    def step_count(self) -> int:
        """Steps that ran a model."""
        return self._loop.step_count

    @property
    @internal_api
    def num_forwards(self) -> int:
        """Passes of requests through this rank's part of the model that were launched, whether or not their tokens have come."""
        return self._executor.num_forwards

    @property
    @internal_api
    def has_broken_pass(self) -> bool:
        """Whether a pass through the stages of the model ended half-way on this rank, where the others wait for it."""
        return self._executor.has_broken_pass

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._admission.waiting)

    @property
    def num_preemptions(self) -> int:
        """How often a request gave up its blocks and went back to the queue."""
        return self._admission.num_preemptions

    @property
    def num_drafted(self) -> int:
        """Proposed tokens that were verified."""
        return self._verification.num_drafted

    @property
    def num_accepted(self) -> int:
        """Proposed tokens that were drawn as well."""
        return self._verification.num_accepted

    @property
    def cuda_graph_request_count_map(self) -> dict[int, int]:
        """Rows of a recorded decode step to how often it was replayed; empty where nothing is recorded."""
        return {} if self._executor.graphs is None else dict(self._executor.graphs.request_counts)

    @property
    def cuda_graph_mixed_count_map(self) -> dict[InferenceBatchDimensions, int]:
        """Size of a recorded step with prompts to how often it was replayed; empty where none is recorded."""
        return {} if self._executor.mixed_graphs is None else dict(self._executor.mixed_graphs.step_counts)

    @property
    def cuda_graph_proposal_count_map(self) -> dict[InferenceBatchDimensions, int]:
        """Size of a recorded step that verifies proposals to how often it was replayed; empty where none is recorded."""
        return {} if self._executor.proposal_graphs is None else dict(self._executor.proposal_graphs.step_counts)

    @torch.no_grad()
    def create_cuda_graphs(self, *, reset_context: bool = True) -> None:
        """Record steps of all sizes now, the largest first, so that no request waits for it; else each is recorded when it is first needed.

        Ranks that share a model call it together, before there is a runner.

        Args:
            reset_context: forget cached beginnings too (``reset_prefix_cache``).

        Raises:
            ValueError: this engine records nothing; says why.
            RuntimeError: it has unfinished requests, or is suspended, or another engine has its context; of ranks that share a model, on
                one of them (`RankFailedError` on the others).
        """
        with refused_together(self.model, "create_cuda_graphs") as agree:
            self._check_idle("create_cuda_graphs")
            agree()
        with self._moves.for_no_request():
            self._executor.record_graphs()
        if reset_context:
            self.reset_prefix_cache()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Do now what the first requests would wait for: record steps where they are recorded, compile the kernels of the others and of
        draws, and take the memory of the largest step.

        Nothing of it is counted, and cached beginnings stay. Ranks that share a model call it together, before there is a runner.

        Raises:
            RuntimeError: as ``create_cuda_graphs``, or the last stage of the pipeline could not draw.
            torch.OutOfMemoryError: a step of ``max_tokens`` does not fit beside weights and cache.
        """
        with refused_together(self.model, "warm_up") as agree:
            self._check_idle("warm_up")
            agree()
        with self._moves.for_no_request():
            self._executor.warm_up()

    @property
    def is_warm(self) -> bool:
        """Whether ``warm_up`` has left nothing that a step would compile or record; False after ``suspend`` has given the recordings up."""
        return self._executor.is_warm

    def _check_idle(self, call: str) -> None:
        self.context.check_owner(self._owner)
        if self.has_unfinished_requests() or self.is_suspended:
            state = "is suspended" if self.is_suspended else f"has {len(self._requests.entries)} unfinished requests"
            raise RuntimeError(f"{call} needs an idle engine, and this one {state}; call it before the first request")

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to return."""
        return self._requests.has_any

    def abort(self, request_id: int, error: Exception | None = None) -> DynamicInferenceRequestRecord | None:
        """End a request now and free what it holds; ``step`` does not return it.

        Args:
            request_id: of ``add_request``.
            error: that its reader met; None for a request that nobody wants any more.

        Returns:
            Its record with what was generated, status FAILED, reason ABORT, or ERROR with the error; None when there is no such request.
        """
        record = self._requests.abort(request_id, error)
        if not self._requests.entries:
            self._loop.forget_batch()
        return record

    # -- stepping ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[DynamicInferenceRequestRecord]:
        """Run the model once over the running requests and what fits of the waiting ones.

        With ``run_ahead`` the results of a step are read while the device computes the next one: a request that ends by a stop token or
        a stop word is computed once more, in vain, and is returned one call later.

        Returns:
            Records of the requests that ended since the last call, whatever way.

        Raises:
            RuntimeError: the engine is suspended, or another one has its context.
            IncompleteWeightsError: a ``load_weights`` failed half-way and was not repeated.
            RankFailedError: of ranks that share experts one is lost, late, or failed in the middle of the model.
            Exception: whatever the model raised. The requests of the step have ended then, with ``StepFailedError``, and hold nothing;
                ``take_finished`` or the next step returns them. The others go on.
        """
        self.context.check_owner(self._owner)
        if self._shared_steps is not None:
            self._shared_steps.run(self._vote(), self._advance, self._moves.follow)
            return self.take_finished()
        if self.is_suspended:
            raise RuntimeError("the engine is suspended; call resume() first")
        self.weights.check_complete()
        self._moves.follow(self.step_count)
        self._advance()
        return self.take_finished()

    def _vote(self) -> Vote:
        """What this rank says of the next step to those that share its experts."""
        assert self._shared_steps is not None, "nobody else asks"
        return self._shared_steps.vote(self.weight_version if self.weights.are_complete else -1, suspended=self.is_suspended)

    @internal_api
    def hold_steps(self, reason: str | None) -> None:
        """Let those that share the experts not step, and say why; None to let them step again.

        Steps that they have decided are made all the same, here as dummy steps.
        """
        if self.peers is not None:
            self.peers.hold = reason

    @internal_api
    def announce_load(self, version: int | None, in_flight: WeightPolicy = "recompute") -> None:
        """Tell those that share the experts which weights are to be loaded here; None for none."""
        if self.peers is not None:
            self.peers.load = None if version is None else (version, in_flight)

    @internal_api
    def finish_steps(self) -> None:
        """Make the steps that ranks which share experts have decided, as dummy steps: others wait in them."""
        if self._shared_steps is not None:
            self._shared_steps.finish(self._vote)

    def _advance(self) -> None:
        self._loop.advance(self.weight_version)

    def take_finished(self) -> list[DynamicInferenceRequestRecord]:
        """Records of the requests that ended since the last call, without a step."""
        return self._requests.take_ended()

    @internal_api
    def watch(self, request_id: int, fail: Callable[[Exception], None]) -> StreamText | None:
        """Let ``take_grown`` return a request that has not ended; nothing happens when it has.

        Args:
            request_id: of ``add_request``.
            fail: called where its text is made, with what the tokenizer raises.

        Returns:
            Its text, for whoever reads it; None where there is none, or where ``generated_text`` of its record grows with each step.
        """
        entry = self._requests.entries.get(request_id)
        if entry is None:
            return None
        entry.is_watched = True
        return None if entry.tokenizer is None else StreamText(entry.tokenizer, entry.record.prompt_tokens, entry.silent_ids, fail)

    @internal_api
    def take_grown(self) -> list[DynamicInferenceRequestRecord]:
        """Records of the watched requests that got tokens since the last call, and have not ended; others cost nothing here."""
        return self._requests.take_grown()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[DynamicInferenceRequestRecord]:
        """Serve these prompts to the end.

        Args:
            prompts: text or token ids.
            sampling_params: for all, or one for each prompt.
            lora: name of a loaded adapter for all, or one or None for each prompt.

        Returns:
            One record for each prompt, in order; ``n`` of them where its settings say so. A prompt that cannot be served has status FAILED
            and its ``error``, be it for its settings: a token that the vocabulary has not, a stop word without a tokenizer, an adapter
            that is not loaded.

        Raises:
            ValueError: the engine is busy with other requests, the prompts are no list, or their number is not that of the settings or the
                adapters.
        """
        settings, loras = settings_of(prompts, sampling_params), loras_of(prompts, lora)
        if self.has_unfinished_requests():
            raise ValueError(
                f"the engine has {len(self._requests.entries)} unfinished requests; step() until they are done, or use add_request"
            )
        completions = completions_of(prompts, settings, loras)
        if self.peers is not None:
            self.peers.spans_steps = True
        try:
            records, num_refused = run_to_end(self if self.peers is None else StepsTogether(self, self.peers), completions)
            self._requests.end_counts.add(FinishReason.ERROR, num_refused)
            return records
        finally:
            if self.peers is not None:
                self.peers.spans_steps = False
                self.finish_steps()
            # Empty unless something was raised.
            for request_id in list(self._requests.entries):
                self.abort(request_id)
            self.take_finished()

    def stats(self) -> dict[str, float]:
        """Counters and the state of the cache, for metrics. ``seconds_to_first_token`` is the age of this process when the engine drew its
        first token, 0 before."""
        return self._figures.read(self.weight_version)

    def latency_stats(self) -> dict[str, float]:
        """Histograms of the times of requests, for metrics: of ``time_to_first_token_seconds``, and of completed requests
        ``time_per_output_token_seconds`` and ``e2e_request_latency_seconds``, the requests up to each bound (``{name}_le_{bound}``), all of
        them (``{name}_count``) and the sum of their times (``{name}_sum``)."""
        return self._requests.latencies.figures()

    # -- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, chunks: Iterable[WeightChunk], version: int | None = None, *, in_flight: WeightPolicy = "recompute") -> None:
        """Replace all parameters and persistent buffers, in place; each rank cuts its part out.

        Addresses stay, so that recorded graphs hold. Chunks are checked and copied by buckets of 256 MiB, and no chunk of a bucket is
        copied before all of it is checked: memory of a chunk must not be written before the bucket is full, or a ``WeightSlice`` that
        ends a buffer closed it (``ends_buffer``), of whichever stage it is. Every later token is stamped with the new version
        (``record.weight_versions``).

        Args:
            chunks: (global name, tensor of the global shape, or ``WeightSlice`` of it) in any order; together every element once.
                Floating-point tensors are cast.
            version: of the new weights; None for ``next_weight_version``. One that was given before is for the weights that had it: to
                repeat a load, or to go back.
            in_flight: what requests in flight do: ``recompute`` their keys and values from their tokens, ``keep`` those of the old
                weights, or end before the load (``drain``), for which steps run here; ``step`` returns their records afterwards.

        Raises:
            WeightLoadError: chunks are a mapping, or one is no pair; an unknown, repeated or missing name, another shape or kind
                of dtype; the model keeps weights in eight bits beside adapters (``LoraConfig.base_dtype``). Where a bucket was copied
                before, the engine refuses to step (``IncompleteWeightsError``) until a load succeeds;
                else it goes on with the old weights.
            ValueError: an unknown policy, or a version that is none.
            RuntimeError: ``drain`` while the engine is suspended, or one that shares its experts cannot step; another engine has the
                context.
            Exception: whatever ``chunks`` raises, or a step of ``drain``.
        """
        check_policy(in_flight)
        check_chunks(chunks)
        self.context.check_owner(self._owner)
        following = self.next_weight_version if version is None else as_integer("version", version, 0, 2**63 - 1)
        if in_flight == "drain":
            self._drain()
        self._loop.read_results()
        self.weights.load(chunks)
        if self._balance is not None:
            self._balance.weights_changed()
        self.weight_version, self._newest_version = following, max(following, self._newest_version)
        self._loop.forget_batch()
        if in_flight == "keep":
            self._admission.keep_cache(following)
        else:
            self._admission.drop_cache()

    @property
    def next_weight_version(self) -> int:
        """Above all versions that weights of this engine had."""
        return self._newest_version + 1

    @property
    def can_step(self) -> bool:
        """Whether ``step`` has weights and memory to run with."""
        return self.weights.are_complete and not self.is_suspended

    @property
    def num_in_flight(self) -> int:
        """Requests that run, or were preempted after their first token."""
        return self._admission.num_in_flight

    @property
    def has_work(self) -> bool:
        """Whether ``step`` can run and has something to do or to return; of ranks that share experts, whether this one is to call it."""
        if self.peers is not None:
            return self.peers.wants_round(self._vote())
        return self.can_step and self._requests.has_work

    def hold_queue(self, hold: bool) -> None:
        """Admit no request that is not in flight (or do so again): the way to drain an engine that is stepped elsewhere."""
        self._admission.holds_queue = hold

    def _drain(self) -> None:
        """Step until no request is in flight."""
        finished: list[DynamicInferenceRequestRecord] = []
        self.hold_queue(True)
        together = None if self.peers is None else StepsTogether(self, self.peers)
        try:
            while self.num_in_flight if together is None else together.has_unfinished_requests():
                finished += self.step() if together is None else together.step()
        finally:
            self.hold_queue(False)
            self._requests.put_back(finished)

    # -- adapters ----------------------------------------------------------------------------------------------------

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in the order of their loads."""
        return self._loras.names

    @torch.no_grad()
    def load_lora(self, name: str, weights: LoraWeights) -> None:
        """Load an adapter that requests can choose from now on, into a free slot of ``InferenceConfig.lora``.

        Ranks of a split model all call it, between the same two steps, each with the whole matrices. Recorded steps hold; adapters stay
        loaded over ``load_weights`` and ``suspend``.

        Args:
            name: by which requests choose it, of 1 to 256 characters.
            weights: for the served base model. Their layers are among the targets of the slots; others of these give what the base does.

        Raises:
            LoraLoadError: the engine has no slots or none is free, the name is none or taken, the rank is too large, a layer has no slots
                or another shape, or a number is not finite in the model's dtype. Nothing is written then.
            RuntimeError: another engine has the context.
        """
        self.context.check_owner(self._owner)
        self._loras.load(name, weights)

    def unload_lora(self, name: str) -> None:
        """Give the slot of an adapter back; what the cache holds of it is found no more, also under another load of the name.

        Ranks of a split model all call it.

        Args:
            name: of a loaded adapter.

        Raises:
            UnknownLoraError: no such adapter is loaded.
            LoraInUseError: requests use it, be it in the queue; it stays.
            RuntimeError: another engine has the context.
        """
        self.context.check_owner(self._owner)
        self._loras.unload(name)

    # -- memory ------------------------------------------------------------------------------------------------------

    @property
    def is_suspended(self) -> bool:
        """Whether the cache has no memory on the device."""
        return not self.context.memory.is_allocated

    @torch.no_grad()
    def suspend(self) -> None:
        """Free the device's memory of cache and states, between any two steps; nothing happens when it is free already.

        No request is lost: their tokens stay, and what the cache held is computed again after ``resume``, or comes back from the host at
        ``unified_memory_level`` 1 and 2. New requests may come. Recorded graphs stay where the cache keeps its addresses: on NVIDIA's
        driver.

        Raises:
            RuntimeError: another engine has the context.
        """
        self.context.check_owner(self._owner)
        if not self.is_suspended:
            self.suspend_within_process()
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()

    def suspend_within_process(self) -> None:
        """As ``suspend``, for whoever works on the device in this process: what torch keeps for later tensors is not given to others.

        A trainer then has the memory of its last step again without asking the driver, which would take it piece by piece.

        Raises:
            RuntimeError: as of ``suspend``.
        """
        self.context.check_owner(self._owner)
        if not self.is_suspended:
            # A recording that others wait in writes to the cache, be it padding.
            self.finish_steps()
            self._cache.free()

    def reset_prefix_cache(self) -> None:
        """Forget what the cache holds, as after a change of the weights that ``load_weights`` did not make.

        No request is lost: their tokens stay, and their keys and values are computed again.

        Raises:
            RuntimeError: another engine has the context.
        """
        self.context.check_owner(self._owner)
        self._cache.forget()

    @torch.no_grad()
    def resume(self) -> None:
        """Take the memory again; nothing happens when the engine has it.

        Raises:
            torch.OutOfMemoryError: others use it; the engine stays suspended.
            RuntimeError: another engine has the context.
        """
        self.context.check_owner(self._owner)
        if self.is_suspended:
            self.context.memory.allocate_again()

    def close(self) -> None:
        """Free the recorded graphs, and the cache unless another engine has it; ask nothing of the engine any more.

        NCCL waits for graphs that hold its communicators: an engine whose ranks share a model is closed before the process groups are
        destroyed.
        """
        if self.context.is_owner(self._owner):
            self.suspend()
        self._executor.clear_graphs()
