# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The steps of an engine, each launched before the results of the one before are read."""

import logging
from collections import deque
from collections.abc import Mapping

import numpy as np

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._admission import Admission
from mcore_inference.engine._decode_batch import DecodeBatch
from mcore_inference.engine._executor import Executor, InFlight, Launched
from mcore_inference.engine._live_requests import LiveRequests
from mcore_inference.engine._step_log import StepLog
from mcore_inference.engine._verification import Verification
from mcore_inference.requests import FinishReason
from mcore_inference.scheduling import StepPlan

_LOG = logging.getLogger("mcore_inference.engine")


class _ResultsFailedError(Exception):
    """A step before the one that is planned has failed, as ``error`` says, and its requests have ended."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class StepLoop:
    """Plans steps, launches them, and gives requests what they drew.

    Args:
        context: of the engine.
        requests: that are served.
        admission: their queue.
        executor: runs the steps.
        verification: of proposed tokens; None where nobody proposes any.
        runs_ahead: results of a step are read when the next one is launched; else at once.
        num_batches: of requests that are in flight at the same time, each in a step of its own that waits for its results, as the stages of
            a pipeline have them; above 1 in place of ``runs_ahead``.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        requests: LiveRequests,
        admission: Admission,
        executor: Executor,
        verification: Verification | None,
        *,
        runs_ahead: bool,
        num_batches: int = 1,
    ) -> None:
        self._context, self._requests, self._admission, self._executor = context, requests, admission, executor
        self._verification, self._num_batches = verification, num_batches
        self._most_in_flight = num_batches - 1 if num_batches > 1 else int(runs_ahead)
        """Steps whose results are not read when the next one is planned."""
        self._in_flight: deque[InFlight | Launched] = deque()
        """The oldest first."""
        self._batch: DecodeBatch | None = None
        self._num_released = 0
        self._closed_state: tuple[int, ...] | None = None
        """Of queue and blocks, when nobody could join the batch."""
        self.step_count = 0
        """Steps that were launched."""
        self.log: StepLog | None = None

    def advance(self, weight_version: int) -> None:
        """Plan a step and launch it, and take the results of the one before.

        In a recording whose size ranks agreed on are requests that decode alone; prompts wait for the next vote.

        Args:
            weight_version: by which requests that begin now are stamped.

        Raises:
            Exception: whatever the model raised; the requests of the step have ended then.
        """
        most, launched = max(0, len(self._in_flight) - 1), False
        try:
            launched = self._launch(weight_version)
            if launched:
                self.step_count += 1
                most = self._most_in_flight
        finally:
            # A step that fails takes nothing from those before it.
            while len(self._in_flight) > most:
                self._take_oldest()
        while self._in_flight and self._num_batches > 1 and not self._admission.may_go_on:
            self._take_oldest()
        if not self._requests.entries:
            # It may hold copies of contexts.
            self.forget_batch()
        if launched and self.log is not None:
            self.log.note(self.step_count)

    def _launch(self, weight_version: int) -> bool:
        """Plan a step and launch it; False where nothing can be computed."""
        admits, requests, executor = self._executor.agreed_rows is None, self._requests, self._executor
        blamed = list(requests.entries.values())
        try:
            drafts = {} if self._verification is None else self._verification.propose()
            batch = None if drafts or self._num_batches > 1 else self._decoding(admits)
            if batch is not None and self._context.extend_lines(batch.lines_R):
                blamed = batch.entries
                self._in_flight.append(executor.decode(batch))
                return True
            # Its rows would lag behind what this step draws.
            self.forget_batch()
            plan = self._plan(drafts, admits)
            blamed = [requests.entries[item.request_id] for item in plan.work]
            for request_id in plan.preempted:
                self._admission.note_pause([requests.entries[request_id]])
                self._admission.preempt(requests.entries[request_id])
            for request_id in plan.admitted:
                self._admission.admit(requests.entries[request_id], weight_version)
            if self._verification is not None:
                self._verification.fill(plan.admitted)
            work = [(requests.entries[item.request_id], item) for item in plan.work]
            if work:
                self._in_flight.append(executor.run(work) if self._num_batches == 1 else executor.launch(work))
            return bool(work)
        except _ResultsFailedError as failure:
            raise failure.error from None
        except Exception as error:
            requests.fail(blamed, error)
            raise

    def read_results(self) -> None:
        """Wait for the steps in flight, if there are any, and take their results, before a call that is not to fail with one of them: the
        requests of a step that failed have ended then."""
        failure = self._read_all()
        if failure is not None:
            _LOG.error("a step in flight failed and ended its requests", exc_info=failure)

    def forget_batch(self) -> None:
        """Plan the next step afresh: requests or what the cache holds of them are no longer what they were."""
        self._batch = self._closed_state = None

    def _decoding(self, admits: bool) -> DecodeBatch | None:
        """The running requests as one batch, when all of them decode and nobody can join."""
        if self._batch is None or not self._batch.steps_left or self._num_released != self._admission.num_released:
            self.forget_batch()
            going_on = self._admission.going_on()
            # The youngest are the ones whose prompts may not be computed.
            if not going_on or not all(entry.grammar is None and self._admission.decodes(entry) for entry in reversed(going_on)):
                return None
            if admits and self._joins(np.array([self._context.line(entry.record.request_id) for entry in going_on])):
                return None
            self._batch = self._executor.batch(going_on)
            self._num_released = self._admission.num_released
        elif admits and self._joins(self._batch.lines_R):
            return None
        return self._batch

    def _joins(self, lines_R: np.ndarray) -> bool:
        """Whether a waiting request can join these lines, which decode; asked again where the queue or the free blocks have changed."""
        admission = self._admission
        if not admission.waiting:
            return False
        num_new = self._context.num_lacking(lines_R)
        state = (admission.num_queue_changes, admission.holds_queue, self._context.allocator.total_avail, num_new)
        if state != self._closed_state:
            if admission.joins_decoding(len(lines_R), num_new):
                return True
            self._closed_state = state
        return False

    def _plan(self, drafts: Mapping[int, int], admits: bool) -> StepPlan:
        if self._num_batches == 1 and any(entry.grammar is not None for entry in self._admission.running):
            # What a form allows next, the host says.
            self._read_to_plan()
        plan = self._admission.plan(admits=admits)
        if plan.preempted and self._in_flight:
            # What is preempted is computed again from tokens that the host knows.
            self._read_to_plan()
            plan = self._admission.plan(admits=admits)
        if drafts:
            assert self._verification is not None, "nobody else proposes"
            plan = self._verification.grant(plan, drafts)
        held = self._admission.holds_queue or not admits
        assert plan.work or self._in_flight or not self._requests.entries or held, "what was accepted can always advance"
        return plan

    def _read_to_plan(self) -> None:
        failure = self._read_all()
        if failure is not None:
            raise _ResultsFailedError(failure)

    def _read_all(self) -> Exception | None:
        """Take the results of all steps in flight; the error of the first that failed."""
        failure: Exception | None = None
        while self._in_flight:
            try:
                self._take_oldest()
            except Exception as error:
                failure = failure or error
        return failure

    def _take_oldest(self) -> None:
        step = self._in_flight.popleft()
        try:
            self._take_results(self._executor.receive(step) if isinstance(step, Launched) else step)
        except Exception as error:
            self._requests.fail(step.entries, error)
            raise

    def _take_results(self, step: InFlight) -> None:
        draws = step.wait()
        self._requests.note_tokens([entry for entry in step.sampled if not entry.ended])
        if step.drafts is not None:
            assert self._verification is not None, "nobody else proposes"
            last = self._verification.take(step.sampled, step.drafts, draws, self._requests.append)
            if last:
                self._executor.set_last_tokens(last)
            draws = []
        for entry, draw in zip(step.sampled, draws, strict=step.drafts is None):
            entry.num_pending -= 1
            # A request that ended meanwhile was computed in vain.
            if not entry.ended:
                self._requests.append(entry, draw)
        for entry in step.computed:
            if not entry.ended:
                self._requests.end(entry, FinishReason.LENGTH)
