# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a policy makes of the problems that are kept for evaluations: sums of one engine, means over all."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from mcore_rl import EvaluationResponse, GenericGenerationArgs, InferenceInterface, MegatronChatLocal, MegatronLocal, NumberedAgent
from mcore_tools.recipes import RunConfig


def num_problems(config: RunConfig, rank: int, num_ranks: int) -> int:
    """Of the problems of an evaluation, those that engine ``rank`` of ``num_ranks`` answers."""
    assert config.rl is not None
    return len(range(rank, config.train.eval_batches * config.rl.num_groups, num_ranks))


def evaluation_names(config: RunConfig, env_ids: Sequence[str]) -> list[str]:
    """Of the numbers of an evaluation, in the order of ``evaluation_sums``: of all environments, then of each, where there are several."""
    assert config.rl is not None
    samples = config.rl.eval_samples
    names = ["reward", "right", *(f"pass@{k}" for k in sorted({1, samples}) if samples)]
    return [*names, *(f"{env_id}/{name}" for env_id in _several(env_ids) for name in names), "num_dropped"]


def evaluation_sums(config: RunConfig, environment: NumberedAgent, interface: InferenceInterface, count: int) -> list[list[float]]:
    """Sum and count of each number over the most likely answers to ``count`` problems, and over further ones for pass@k."""
    assert config.rl is not None
    args, samples = config.rl.generation_args, config.rl.eval_samples

    def ask(args: GenericGenerationArgs, num_samples: int) -> EvaluationResponse:
        limit_s = config.rl.rollout_timeout_s if config.rl is not None else None
        call = environment.run_evaluation(interface, num_prompts=count, args=args, num_samples=num_samples, timeout_s=limit_s)
        return asyncio.run(call)

    greedy = ask(args.add(GenericGenerationArgs(temperature=0.0)), 1)
    drawn = ask(args, samples) if samples else None

    def numbers(greedy: EvaluationResponse, drawn: EvaluationResponse | None) -> list[list[float]]:
        rewards = greedy.metrics()["reward"]
        return [
            rewards,
            [float(reward >= 1.0) for reward in rewards],
            *([] if drawn is None else (drawn.pass_at(k) for k in sorted({1, samples}))),
        ]

    parts = [numbers(greedy, drawn)]
    parts += [numbers(greedy.of(env_id), None if drawn is None else drawn.of(env_id)) for env_id in _several(environment.env_ids)]
    num_dropped = greedy.num_dropped + (0 if drawn is None else drawn.num_dropped)
    return [*([sum(values), len(values)] for part in parts for values in part), [num_dropped, 1]]


def evaluation_share(config: RunConfig, environment: NumberedAgent, interface: InferenceInterface, count: int) -> list[list[float]]:
    """``evaluation_sums`` on the rank that asks its engine, and nothing to add to them on the others of an engine over several ranks; all
    of these call it together."""
    is_local = isinstance(interface, MegatronLocal | MegatronChatLocal)
    with interface.drawing() if is_local else contextlib.nullcontext(True) as asks:
        if asks:
            return evaluation_sums(config, environment, interface, count)
    return [[0.0, 0.0] for _ in evaluation_names(config, environment.env_ids)]


def evaluation_means(config: RunConfig, env_ids: Sequence[str], sums: Sequence[Sequence[float]]) -> Mapping[str, float]:
    """The numbers of an evaluation from their sums over all engines; of dropped answers the number. A mean over nothing, as pass@k is where
    no problem has k answers, is left out."""
    *totals, (num_dropped, _) = sums
    named = zip(evaluation_names(config, env_ids)[:-1], totals, strict=True)
    return {**{f"eval/{name}": total / number for name, (total, number) in named if number}, "eval/num_dropped": num_dropped}


def _several(env_ids: Sequence[str]) -> Sequence[str]:
    """Environments that have numbers of their own."""
    return env_ids if len(env_ids) > 1 else ()
