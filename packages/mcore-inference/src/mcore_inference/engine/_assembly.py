# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The parts of an engine, made of a model and a context where nothing is to be refused."""

from dataclasses import dataclass

from mcore_inference._capability import (
    EngineCapability,
    check_cache,
    check_layout,
    check_states,
    check_weights,
    shares_experts,
    shares_prefixes,
)
from mcore_inference._fields import as_integer
from mcore_inference.adapters import LoraTable, check_slots
from mcore_inference.context import DynamicInferenceContext
from mcore_inference.decoder import check_quantization, quantize_weights
from mcore_inference.engine._admission import Admission
from mcore_inference.engine._equal_ranks import check_equal_ranks, refused_together
from mcore_inference.engine._executor import ExecutionConfig, Executor
from mcore_inference.engine._expert_balance import ExpertBalance, check_experts
from mcore_inference.engine._expert_peers import ExpertPeers
from mcore_inference.engine._intake import Intake
from mcore_inference.engine._live_requests import LiveRequests
from mcore_inference.engine._loras import EngineLoras
from mcore_inference.engine._shared_steps import SharedSteps
from mcore_inference.engine._step_loop import StepLoop
from mcore_inference.engine._verification import NgramProposals, Verification
from mcore_inference.engine._weights import ModelWeights
from mcore_inference.speculation import NgramSpeculation
from mcore_inference.text import Tokenizer
from mcore_parallel.models import GPTModel


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Of one engine, which has its context and its weights from then on."""

    owner: int
    """Of the context."""
    vocab_size: int
    """Ids that exist."""
    max_waiting_requests: int | None
    executor: Executor
    admission: Admission
    requests: LiveRequests
    verification: Verification
    loop: StepLoop
    weights: ModelWeights
    balance: ExpertBalance | None
    """Of experts that move."""
    peers: ExpertPeers | None
    """Ranks that share experts."""
    shared_steps: SharedSteps | None
    """With them."""
    intake: Intake
    loras: EngineLoras
    log_interval_steps: int | None
    """Of the log; None for none."""


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Of an engine, checked."""

    seed: int
    vocab_size: int
    max_waiting_requests: int | None
    execution: ExecutionConfig
    shares_prefixes: bool


def assemble(
    model: GPTModel,
    context: DynamicInferenceContext,
    tokenizer: Tokenizer | None,
    execution: ExecutionConfig | None,
    *,
    seed: int,
    vocab_size: int | None,
    max_waiting_requests: int | None,
) -> EngineParts:
    """Make the parts of an engine; what is refused leaves model and context as they were.

    Args and errors are those of ``DynamicInferenceEngine``.
    """
    owner, balance, table = 0, None, None
    with refused_together(model, "the engine") as agree:
        arguments = _checked(model, context, tokenizer, execution, seed, vocab_size, max_waiting_requests)
        execution = arguments.execution

        def claim() -> LoraTable | None:
            """Make context and weights those of this engine, and adapters beside them."""
            nonlocal owner, balance, table
            # Where a rank has no memory for it, the others hear so.
            table = None if context.config.lora is None else LoraTable(model, context.config.lora)
            agree()
            check_equal_ranks(model.groups, context, vocab_size=arguments.vocab_size, seed=arguments.seed)
            if table is not None:
                table.join_stages(model)
            owner = context.take_over()
            if context.config.weight_dtype is not None:
                quantize_weights(model, context.config.weight_dtype)
            if arguments.execution.expert_balancing is not None:
                balance = ExpertBalance(model, arguments.execution.expert_balancing)
            return table

        try:
            executor = Executor(model, context, arguments.vocab_size, execution, claim)
        except BaseException:
            context.release_new_draft_pages()
            raise
    speculates = execution.speculation is not None
    waits = speculates or shares_experts(model) or execution.run_ahead is False
    num_batches = 1 if waits else model.groups.pp.size
    admission = Admission(context, num_batches)
    requests = LiveRequests(admission)
    runs_ahead = context.device.type == "cuda" and not speculates if execution.run_ahead is None else execution.run_ahead
    ngrams = execution.speculation if isinstance(execution.speculation, NgramSpeculation) else None
    verification = Verification(context, admission, executor.drafts if ngrams is None else NgramProposals())
    peers = ExpertPeers(model) if shares_experts(model) else None
    loop = StepLoop(
        context, requests, admission, executor, verification if speculates else None, runs_ahead=runs_ahead, num_batches=num_batches
    )
    loras = EngineLoras(table, requests)
    return EngineParts(
        owner=owner,
        vocab_size=arguments.vocab_size,
        max_waiting_requests=arguments.max_waiting_requests,
        log_interval_steps=execution.log_interval_steps,
        executor=executor,
        admission=admission,
        requests=requests,
        verification=verification,
        loop=loop,
        weights=ModelWeights(model),
        balance=balance,
        peers=peers,
        shared_steps=None if peers is None else SharedSteps(peers, model, executor, requests, admission, balance, speculates=speculates),
        intake=Intake(
            context,
            tokenizer,
            arguments.vocab_size,
            seed=arguments.seed,
            ngrams=ngrams,
            shares_prefixes=arguments.shares_prefixes,
            loras=loras,
        ),
        loras=loras,
    )


def _checked(
    model: GPTModel,
    context: DynamicInferenceContext,
    tokenizer: Tokenizer | None,
    execution: ExecutionConfig | None,
    seed: int,
    vocab_size: int | None,
    max_waiting_requests: int | None,
) -> _Arguments:
    EngineCapability().check_model(model)
    check_layout(model)
    _check_kinds(context, tokenizer, execution)
    check_states(model, None if context.states is None else context.states.config)
    check_cache(model, context.cache, context.max_sequence_length)
    weight_dtype = context.config.weight_dtype
    check_weights(model, weight_dtype)
    check_quantization(model, weight_dtype)
    check_slots(model, context.config.lora)
    shares = shares_prefixes(model, context.config.enable_prefix_caching)
    seed = as_integer("seed", seed, -(2**63), 2**63 - 1)
    most_ids = model.config.vocab_size
    if vocab_size is not None:
        vocab_size = as_integer("vocab_size", vocab_size, 1, most_ids)
    if max_waiting_requests is not None:
        max_waiting_requests = as_integer("max_waiting_requests", max_waiting_requests, 1, 2**31)
    execution = ExecutionConfig() if execution is None else execution
    check_experts(model, execution.expert_balancing)
    limit = most_ids if tokenizer is None else min(tokenizer.vocab_size, most_ids)
    return _Arguments(
        seed=seed,
        vocab_size=vocab_size or limit,
        max_waiting_requests=max_waiting_requests,
        execution=execution,
        shares_prefixes=shares,
    )


def _check_kinds(context: object, tokenizer: object, execution: object) -> None:
    if not isinstance(context, DynamicInferenceContext):
        raise ValueError(f"context is a {type(context).__name__}; give DynamicInferenceContext.for_model(model)")
    if execution is not None and not isinstance(execution, ExecutionConfig):
        raise ValueError(f"execution is a {type(execution).__name__}; give ExecutionConfig(...), or None for the defaults")
    if tokenizer is None:
        return
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}, which lacks a part of vocab_size, eod, tokenize and detokenize; wrap one of the "
            "transformers library in TransformersTokenizer(...)"
        )
    as_integer("vocab_size of the tokenizer", tokenizer.vocab_size, 1, 2**31)
