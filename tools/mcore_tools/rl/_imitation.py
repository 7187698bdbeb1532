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
from mcore_rl import NumberedAgent, NumberedProblems, Problem, TokenRollout
from mcore_tools.assembly import Parts
from mcore_tools.recipes import RLConfig, RunConfig
from mcore_tools.rl._conversations import recited

Row = tuple[list[int], list[bool]]
"""Tokens, and which of them are learnt."""
_SHOWS_NONE = "environment {!r} shows no answers to imitate; set rl.imitation_steps=0"


def texts(environment: NumberedAgent, count: int) -> Iterator[str]:
    """Problems of the environment with answers, for a tokenizer."""
    generator = random.Random("texts")
    for number in range(count):
        problem = environment.problem(number)
        yield problem.prompt + (environment.attempt(problem, generator) or "")


def imitate(config: RunConfig, parts: Parts, environment: NumberedAgent, tokenizer: Tokenizer, device: torch.device) -> float:
    """``rl.imitation_steps`` updates on well-formed answers; the loss of the last one.

    Raises:
        ValueError: the environment shows no answers, or one with its problem exceeds ``train.seq_len``.
    """
    assert config.rl is not None
    dp, loss, num_steps = parts.groups.dp, float("nan"), config.rl.imitation_steps
    per_rank, rates = config.train.global_batch_size // dp.size, _rates(config.rl)

    async def rows(step: int) -> list[Row]:
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
            report = train_step(
                parts.model,
                batches,
                CrossEntropyObjective(),
                parts.sync,
                parts.optimizer,
                lr=rates.lr(step),
                pipeline=parts.pipeline,
                overlap=parts.overlap,
            )
            loss = report.loss
    # References, critics and engines begin with these weights, and read them outside of a forward.
    parts.sync.finish_param_sync()
    return loss


def _rates(rl: RLConfig) -> ConstantSchedule | CosineSchedule:
    """Learning rates of the updates."""
    lr, num_steps = rl.imitation_lr, rl.imitation_steps
    if rl.imitation_lr_schedule == "constant":
        return ConstantSchedule(max_lr=lr)
    return CosineSchedule(max_lr=lr, min_lr=lr / 10, warmup_steps=num_steps // 20, decay_steps=num_steps)


async def _row(config: RunConfig, environment: NumberedAgent, tokenizer: Tokenizer, number: int) -> Row:
    """Tokens of a problem and its answer, or of a conversation about it, and which of them are learnt."""
    assert config.rl is not None
    generator = random.Random(f"imitation {config.train.seed} {number}")
    # Other problems than the first that are posed.
    problem = environment.problem((1 << 31) + number)
    most, tries = config.train.seq_len + 1, config.rl.imitation_tries
    if environment.holds_conversations:
        rollout = await best_conversation(environment, problem, generator, tries, tokenizer, most)
        return list(rollout.trajectory), list(rollout.generation_mask)
    assert isinstance(environment, NumberedProblems), "agents are of one kind or the other"
    attempt = await best_attempt(environment, problem, generator, tries)
    prompt, answer = list(tokenizer.tokenize(problem.prompt)), [*tokenizer.tokenize(attempt), tokenizer.eod]
    if len(prompt) + len(answer) > most:
        raise ValueError(
            f"problem {problem.problem_id} with its answer has {len(prompt) + len(answer)} tokens; raise train.seq_len={most - 1}"
        )
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


async def best_conversation(
    environment: NumberedAgent, problem: Problem, generator: random.Random, tries: int, tokenizer: Tokenizer, max_tokens: int
) -> TokenRollout:
    """Of several well-formed conversations the one of the best reward, the first of equals."""
    rollouts = []
    for _ in range(tries):
        answers = environment.attempt_turns(problem, generator)
        if answers is None:
            raise ValueError(_SHOWS_NONE.format(environment.env_id))
        try:
            rollouts.append(await recited(environment, problem, answers, tokenizer, max_tokens))
        except ValueError as error:
            raise ValueError(f"rl.imitation_steps: {error} (max_tokens is train.seq_len + 1)") from error
    return max(rollouts, key=lambda rollout: rollout.reward)


async def best_attempt(environment: NumberedProblems, problem: Problem, generator: random.Random, tries: int) -> str:
    """Of several well-formed answers the one of the best reward, the first of equals."""
    attempts = [attempt for _ in range(tries) if (attempt := environment.attempt(problem, generator)) is not None]
    if not attempts:
        raise ValueError(_SHOWS_NONE.format(environment.env_id))
    if tries == 1:
        return attempts[0]
    return max([(await environment.get_reward(attempt, problem), -number, attempt) for number, attempt in enumerate(attempts)])[2]


def _batches(config: RunConfig, rows: Sequence[Row], device: torch.device) -> list[Batch]:
    """Micro-batches of padded rows, in which the answers are learnt."""
    size, length = config.train.micro_batch_size, config.train.seq_len
    tokens = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    mask = torch.zeros(len(rows), length)
    for number, (row, learnt) in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row) - 1] = torch.tensor(learnt[1:], dtype=mask.dtype)
    # Padding is not routed to experts, and comes after all that counts.
    valid = torch.arange(length) < torch.tensor([len(row) for row, _ in rows])[:, None]
    tokens, mask, valid = (value.to(device) for value in (tokens, mask, valid))
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    return [Batch(tokens=tokens[part, :-1], labels=tokens[part, 1:], loss_mask=mask[part], valid=valid[part]) for part in parts]
