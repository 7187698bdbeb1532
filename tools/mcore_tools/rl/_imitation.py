# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model of random weights learns the form of answers, before it can be judged."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mcore_parallel.data import Tokenizer
from mcore_parallel.optim import ConstantSchedule, CosineSchedule
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_rl import NumberedAgent, NumberedProblems, Problem
from mcore_tools.assembly import Parts
from mcore_tools.recipes import RLConfig, RunConfig


def texts(environment: NumberedAgent, count: int) -> Iterator[str]:
    """Problems of the environment with answers, for a tokenizer."""
    generator = random.Random("texts")
    for number in range(count):
        problem = environment.problem(number)
        yield problem.prompt + (environment.attempt(problem, generator) or "")


def imitate(config: RunConfig, parts: Parts, environment: NumberedProblems, tokenizer: Tokenizer, device: torch.device) -> float:
    """``rl.imitation_steps`` updates on well-formed answers; the loss of the last one.

    Raises:
        ValueError: the environment shows no answers, or one with its problem exceeds ``train.seq_len``.
    """
    assert config.rl is not None
    dp, loss, num_steps = parts.groups.dp, float("nan"), config.rl.imitation_steps
    per_rank, rates = config.train.global_batch_size // dp.size, _rates(config.rl)

    async def rows(step: int) -> list[tuple[list[int], int]]:
        begin = step * config.train.global_batch_size + dp.rank * per_rank
        return [await _row(config, environment, tokenizer, begin + number) for number in range(per_rank)]

    parts.model.train()
    # The next rows are written while a step runs.
    with ThreadPoolExecutor(1) as writer:
        following = writer.submit(asyncio.run, rows(0))
        for step in range(num_steps):
            batches = _batches(config, following.result(), device)
            if step + 1 < num_steps:
                following = writer.submit(asyncio.run, rows(step + 1))
            report = train_step(parts.model, batches, CrossEntropyObjective(), parts.sync, parts.optimizer, lr=rates.lr(step))
            loss = report.loss
    return loss


def _rates(rl: RLConfig) -> ConstantSchedule | CosineSchedule:
    """Learning rates of the updates."""
    lr, num_steps = rl.imitation_lr, rl.imitation_steps
    if rl.imitation_lr_schedule == "constant":
        return ConstantSchedule(max_lr=lr)
    return CosineSchedule(max_lr=lr, min_lr=lr / 10, warmup_steps=num_steps // 20, decay_steps=num_steps)


async def _row(config: RunConfig, environment: NumberedProblems, tokenizer: Tokenizer, number: int) -> tuple[list[int], int]:
    """Tokens of a problem and its answer, and where that begins."""
    assert config.rl is not None
    generator = random.Random(f"imitation {config.train.seed} {number}")
    # Other problems than the first that are posed.
    problem = environment.problem((1 << 31) + number)
    attempt = await best_attempt(environment, problem, generator, config.rl.imitation_tries)
    prompt = list(tokenizer.tokenize(problem.prompt))
    tokens = [*prompt, *tokenizer.tokenize(attempt), tokenizer.eod]
    if len(tokens) > config.train.seq_len + 1:
        length = config.train.seq_len
        raise ValueError(f"problem {problem.problem_id} with its answer has {len(tokens)} tokens; raise train.seq_len={length}")
    return tokens, len(prompt)


async def best_attempt(environment: NumberedProblems, problem: Problem, generator: random.Random, tries: int) -> str:
    """Of several well-formed answers the one of the best reward, the first of equals."""
    attempts = [attempt for _ in range(tries) if (attempt := environment.attempt(problem, generator)) is not None]
    if not attempts:
        raise ValueError(f"environment {environment.env_id!r} shows no answers to imitate; set rl.imitation_steps=0")
    if tries == 1:
        return attempts[0]
    return max([(await environment.get_reward(attempt, problem), -number, attempt) for number, attempt in enumerate(attempts)])[2]


def _batches(config: RunConfig, rows: Sequence[tuple[list[int], int]], device: torch.device) -> list[Batch]:
    """Micro-batches of padded rows, in which the answer is learnt."""
    size, length = config.train.micro_batch_size, config.train.seq_len
    tokens = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    mask = torch.zeros(len(rows), length)
    for number, (row, begin) in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, begin - 1 : len(row) - 1] = 1.0
    # Padding is not routed to experts, and comes after all that counts.
    valid = torch.arange(length) < torch.tensor([len(row) for row, _ in rows])[:, None]
    tokens, mask, valid = (value.to(device) for value in (tokens, mask, valid))
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    return [Batch(tokens=tokens[part, :-1], labels=tokens[part, 1:], loss_mask=mask[part], valid=valid[part]) for part in parts]
