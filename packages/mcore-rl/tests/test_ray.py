# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Judges and engines as workers of a Ray cluster of two nodes: placed, restarted, given their weights, named when they are lost.

Needs the extra ``ray``; `nox -s ray` installs it.
"""

import asyncio
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    Learner,
    MegatronLocal,
    NumberedProblems,
    Problem,
    RayInference,
    RayJudge,
    RayOptions,
    RayWorkerError,
    RayWorkers,
    grpo_iteration,
    refit,
)
from mcore_rl.envs import CharacterShare

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
# Ray's own processes and sockets.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]
TOKENIZER = ByteTokenizer()
VOCAB = -(-TOKENIZER.vocab_size // 8) * 8
SIZES = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=VOCAB)
ONE = RayOptions(num_workers=2, num_cpus=0.5, call_timeout_s=60.0, start_timeout_s=120.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    # Workers cannot import this file by its name.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    own = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
    own.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"second": 1})
    own.wait_for_nodes()
    # What is imported here is imported there.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}}
    ray.init(address=own.address, runtime_env=environment, logging_level="error")
    yield own
    ray.shutdown()
    own.shutdown()


class Judge(NumberedProblems):
    """Rewards the length of an answer; some answers are the end of whoever judges them."""

    def __init__(self, marks: str = "") -> None:
        super().__init__("length", judge_timeout_s=60.0)
        self.marks = marks

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="p", golden="")

    async def get_reward(self, response: str, problem: Problem) -> float:
        if response.startswith("die"):
            mark = Path(self.marks) / response
            if response != "die once" or not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if response == "raise":
            raise ArithmeticError("no such number")
        if response == "sleep":
            await asyncio.sleep(30)
        return float(len(response))


class Answers(InferenceInterface):
    """Says what it was told to, one after the other."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def encode(self, text: str) -> list[int]:
        return [1]

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        return [[InferenceResponse(response=self.texts.pop(0), token_ids=[1, 2], prompt_length=1, logprobs=[-1.0])]]


def rollouts(environment: NumberedProblems, *texts: str) -> list[float]:
    args = GenericGenerationArgs(max_tokens=1)
    group = asyncio.run(environment.group_rollout(Answers(*texts), size=len(texts), args=args))
    return [rollout.reward for rollout in group]


def test_judges_on_two_nodes_give_the_rewards_of_one_here() -> None:
    environment = RayJudge(Judge, ONE)
    try:
        assert len(set(environment.workers.nodes)) == 2
        texts = ["a", "bb", "", "cccc"]
        assert rollouts(environment, *texts) == rollouts(Judge(), *texts) == [1.0, 2.0, 0.0, 4.0]
        assert environment.problem(3).problem_id == "3" and environment.workers.num_restarts == [0, 0]
    finally:
        environment.close()
        environment.close()


def test_a_judge_that_dies_is_started_again_and_no_answer_is_lost(tmp_path: Path) -> None:
    environment = RayJudge(functools.partial(Judge, str(tmp_path)), ONE)
    try:
        assert rollouts(environment, "a", "die once", "bb") == [1.0, 8.0, 2.0]
        assert sum(environment.workers.num_restarts) == 1
        assert rollouts(environment, "a", "bb") == [1.0, 2.0]
    finally:
        environment.close()


def test_what_is_lost_for_good_loses_its_answer_alone_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RayOptions(num_workers=2, num_cpus=0.5, max_restarts=1, max_task_retries=0, call_timeout_s=5.0, start_timeout_s=120.0)
    environment = RayJudge(functools.partial(Judge, str(tmp_path)), options)
    try:
        with caplog.at_level(logging.WARNING):
            assert rollouts(environment, "a", "raise") == [1.0]
            assert "no such number" in caplog.text
            begin = time.monotonic()
            assert rollouts(environment, "bb", "sleep") == [2.0] and time.monotonic() - begin < 20
            assert "did not answer get_reward within call_timeout_s=5" in caplog.text and "of 'length' (first on node" in caplog.text
            assert rollouts(environment, "die always") == []
            assert "was lost in get_reward, with max_restarts=1 and max_task_retries=0" in caplog.text
    finally:
        environment.close()


def test_workers_that_find_no_place_are_named() -> None:
    needs = RayOptions(num_workers=2, num_cpus=0.1, resources={"third": 1}, start_timeout_s=3.0)
    with pytest.raises(RayWorkerError, match=r"workers \[0, 1\] of 'few' did not start within start_timeout_s=3, each needs .*'third': 1"):
        RayWorkers(Judge, needs, name="few")


def test_an_object_that_cannot_be_made_says_why() -> None:
    with pytest.raises(RayWorkerError, match=r"worker 0 of 'length' did not start.*"):
        RayWorkers(functools.partial(Judge, 1, 2, 3), ONE, name="length")  # type: ignore[call-arg]


# -- engines -----------------------------------------------------------------------------------------------------------


def make_engine() -> tuple[MegatronLocal, DynamicInferenceEngine]:
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8))
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5).eval()
    engine = DynamicInferenceEngine(model, context, TOKENIZER, seed=os.getpid(), vocab_size=TOKENIZER.vocab_size)
    return MegatronLocal(engine), engine


def kill(inference: RayInference, number: int) -> None:
    """As the out-of-memory killer."""

    async def pid() -> int:
        return await inference.workers.call("pid", worker=number)

    os.kill(asyncio.run(pid()), signal.SIGKILL)


def test_a_policy_learns_from_engines_on_two_nodes_and_one_that_dies_comes_back_with_the_newest_weights() -> None:
    groups = ProcessGroups.single()
    model = GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    learner = Learner(model=model, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer)
    args = GenericGenerationArgs(temperature=1.0, max_tokens=8)
    config = GRPOConfig(num_groups=2, group_size=16, seq_len=16, micro_batch_size=8, generation_args=args)
    agent = CharacterShare(["a", "b"], "abcdefghijklmnopqrstuvwxyz")
    inference = RayInference(make_engine, tokenizer=TOKENIZER, options=ONE, bucket_bytes=10_000)
    try:
        refit(model, groups, inference)
        parts: dict[str, Any] = {"agent": agent, "interface": inference, "engine": inference, "learner": learner}
        reports = [grpo_iteration(config, **parts, lr=2e-2) for _ in range(12)]
        kill(inference, 1)
        reports += [grpo_iteration(config, **parts, lr=2e-2) for _ in range(3)]
        assert all(report.train.metrics["logprob_mismatch"] < 1e-4 and report.num_dropped == 0 for report in reports)
        # Workers draw from seeds of their own, so that no run is the same.
        assert sum(report.mean_reward for report in reports[-3:]) > 1.2 * sum(report.mean_reward for report in reports[:3])
        assert inference.version == 16 and len(set(inference.workers.nodes)) == 2
        assert inference.workers.num_restarts == [0, 1]
    finally:
        inference.close()


def test_weights_that_a_worker_refuses_are_named() -> None:
    inference = RayInference(make_engine, tokenizer=TOKENIZER, options=ONE)
    try:
        with pytest.raises(RayWorkerError, match=r"version 1 of the weights was not taken by 2 of the workers: worker 0 of 'engines' .*"):
            inference.load_weights([("stranger", next(make_engine()[1].model.parameters()).detach())])
    finally:
        inference.close()
