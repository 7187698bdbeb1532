# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps that ranks which share the experts of a mixture make together, each for requests of its own."""

import dataclasses
from collections.abc import Callable

import torch

from mcore_inference._capability import exchanges_tokens
from mcore_inference.engine._admission import Admission
from mcore_inference.engine._executor import Executor
from mcore_inference.engine._expert_balance import ExpertBalance
from mcore_inference.engine._expert_peers import ExpertPeers
from mcore_inference.engine._expert_votes import Decision, Vote
from mcore_inference.engine._live_requests import LiveRequests
from mcore_inference.engine._offline import Stepper
from mcore_inference.requests import DynamicInferenceRequestRecord, Prompt
from mcore_inference.sampling import SamplingParams
from mcore_parallel.models import GPTModel, TransformerLayer
from mcore_parallel.nn import Step


class SharedSteps:
    """One rank's passes through the model, each made where all ranks make one.

    Args:
        peers: the ranks.
        model: of this rank.
        executor: counts its forwards, and replays recordings of the size that all agreed on.
        requests: of this rank.
        admission: their queue.
        balance: of the experts; None where they do not move.
        speculates: whether a step may have proposals, which is known only when it begins.
    """

    def __init__(
        self,
        peers: ExpertPeers,
        model: GPTModel,
        executor: Executor,
        requests: LiveRequests,
        admission: Admission,
        balance: ExpertBalance | None,
        *,
        speculates: bool,
    ) -> None:
        self._peers, self._model, self._executor = peers, model, executor
        self._requests, self._admission, self._balance, self._speculates = requests, admission, balance, speculates

    def vote(self, weights: int, *, suspended: bool) -> Vote:
        """What this rank says of the next step.

        Args:
            weights: their version; -1 while they are not whole.
            suspended: the rank has no memory to step with.
        """
        hold = self._peers.hold
        if hold is None and suspended:
            hold = "is suspended; call resume() there"
        version, policy = self._peers.load or (None, None)
        max_steps = self._peers.max_steps
        # With results that are read a step later.
        num_left = max_steps if self._admission.waiting else 1 + max((entry.num_left for entry in self._admission.running), default=0)
        is_home = self._balance is not None and self._balance.is_home
        return Vote(self._requests.has_work, hold, weights, version, policy, max_steps, num_left, is_home=is_home)

    def run(self, vote: Vote, advance: Callable[[], None], follow_loads: Callable[[int], None]) -> None:
        """One pass, by a vote or as the last vote decided: ``advance``, or a dummy step where the rank has no requests, is held, or runs no
        model.

        ``Executor.agreed_rows`` says which. Before the first pass of a decision experts may move, in ``follow_loads`` with the number of
        passes that all ranks have made.

        Raises:
            RankFailedError: a rank is lost, late, or failed in the middle of the model.
            Exception: whatever ``advance`` raised outside of the model.
        """
        is_first, num_steps = not self._peers.num_left, self._peers.num_steps
        decision, executor = self._peers.decide(self._with_graphs(vote)), self._executor
        if not decision.steps:
            return
        if is_first:
            try:
                follow_loads(num_steps)
            except Exception as error:
                raise self._peers.fail(error) from error
        executor.agreed_rows = decision.graph_rows
        before = executor.num_forwards_begun
        try:
            if self._requests.entries and vote.hold is None:
                advance()
        except Exception as error:
            if executor.num_forwards_begun != executor.num_forwards:
                raise self._peers.fail(error) from error
            raise
        finally:
            if executor.num_forwards_begun == before:
                self._run_dummy()

    def finish(self, vote: Callable[[], Vote]) -> None:
        """Make the steps that were decided, as dummy steps: others wait in them."""
        while self._peers.num_left and self._peers.decide(vote()).steps:
            self._run_dummy()

    def _with_graphs(self, vote: Vote) -> Vote:
        """The vote, and which recordings hold the next steps of this rank."""
        graphs = self._executor.graphs
        if graphs is None or self._speculates or self._peers.num_left:
            return vote
        rows = graphs.padded(len(self._admission.running)) if self._admission.next_only_decodes else None
        # Without a recording there is a prompt: it is over in a step or a few.
        return dataclasses.replace(vote, graph_rows=rows, max_graph_rows=graphs.max_rows, max_steps=1 if rows is None else vote.max_steps)

    def _run_dummy(self) -> None:
        try:
            if self._executor.agreed_rows is None:
                run_dummy(self._model)
            else:
                self._executor.run_padding()
        except Exception as error:
            raise self._peers.fail(error) from error


class StepsTogether:
    """An engine of ranks that share experts, which steps until none of them has work.

    Args:
        engine: of this rank.
        peers: its peers.
    """

    def __init__(self, engine: Stepper, peers: ExpertPeers) -> None:
        self._engine, self._peers = engine, peers
        self._last: Decision | None = None

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora: str | None = None) -> int:
        return self._engine.add_request(prompt, sampling_params, lora=lora)

    def step(self) -> list[DynamicInferenceRequestRecord]:
        finished = self._engine.step()
        self._last = self._peers.last
        if self._last.hold is not None:
            raise RuntimeError(f"no rank can step: {self._last.hold}")
        return finished

    def has_unfinished_requests(self) -> bool:
        return self._last is None or self._last.steps


@torch.no_grad()
def run_dummy(model: GPTModel) -> None:
    """The exchanges of a step of a rank without work: its mixtures get one token of padding, which goes to no expert.

    Cache, counters and random numbers stay as they are.
    """
    place = next(model.parameters())
    x_TD = torch.zeros((1, model.config.hidden_size), dtype=model.dtype, device=place.device)
    step = dataclasses.replace(Step.causal(1, 1, place.device), valid=torch.zeros(1, dtype=torch.bool, device=place.device))
    for layer in model.layers.values():
        if isinstance(layer, TransformerLayer) and exchanges_tokens(layer):
            assert layer.mlp is not None
            layer.mlp(x_TD, step)
