# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Training steps of the small recipes, in turn with the same architecture in plain transformers and AdamW of torch."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mcore_parallel.training import Batch, train_step
from mcore_tools.assembly import assemble
from mcore_tools.recipes import RunConfig, recipe

SMALL = ("moe_tiny", "gpt_tiny")
"""Recipes; the first is what the quickstart trains."""


def small_rows(name: str, rounds: int, steps: int, threads: int) -> list[dict[str, Any]]:
    """A row for each who trains, as the work of one rank; the ratio is the median over rounds in which both take turns."""
    torch.set_num_threads(threads)
    config = recipe(name)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=1e-4))
    train = config.train
    ours, our_size = _ours(config)
    theirs, their_size = _transformers(config)
    if our_size != their_size:
        raise AssertionError(f"the two models of {name} have {our_size} and {their_size} parameters")
    workers: dict[str, Callable[[], float]] = {"mcore": ours, "transformers + AdamW": theirs}
    first = {who: step() for who, step in workers.items()}
    times: dict[str, list[float]] = {who: [] for who in workers}
    for number in range(rounds + 1):
        for who, step in workers.items():
            gc.collect()
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            if number:
                times[who].append((time.perf_counter() - begin) / steps)
    tokens = train.global_batch_size * train.seq_len
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    return [
        {
            "model": name, "by": who, "gpus": 0, "threads": torch.get_num_threads(), "parameters": our_size, "first_loss": first[who],
            "ms": round(statistics.median(seconds) * 1e3, 2), "min_ms": round(min(seconds) * 1e3, 2),
            "max_ms": round(max(seconds) * 1e3, 2),
            "tokens_per_s": round(tokens / statistics.median(seconds)), "ratio": round(ratio, 3) if who == "mcore" else 1.0,
        }
        for who, seconds in times.items()
    ]  # fmt: skip


def _tokens(config: RunConfig) -> list[torch.Tensor]:
    """Micro-batches [B, S + 1] of one step."""
    train, generator = config.train, torch.Generator().manual_seed(0)
    shape = (train.micro_batch_size, train.seq_len + 1)
    count = train.global_batch_size // train.micro_batch_size
    return [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(count)]


def _ours(config: RunConfig) -> tuple[Callable[[], float], int]:
    parts = assemble(config, torch.device("cpu"))
    batches = [
        Batch(tokens=x[:, :-1].contiguous(), labels=x[:, 1:].contiguous(), loss_mask=torch.ones(x.shape[0], x.shape[1] - 1))
        for x in _tokens(config)
    ]
    model: Any = parts.model

    def step() -> float:
        return train_step(model, batches, parts.objective, parts.sync, parts.optimizer, lr=config.optimizer.lr).loss

    return step, sum(parameter.numel() for parameter in model.parameters())


def _transformers(config: RunConfig) -> tuple[Callable[[], float], int]:
    import transformers

    model, optimizer = config.model, config.optimizer
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups, "rms_norm_eps": model.norm_epsilon, "use_cache": False,
    }  # fmt: skip
    if config.moe is None:
        chosen: Any = transformers.LlamaConfig(**sizes)
    else:
        balance = config.moe.moe_aux_loss_coeff
        if isinstance(balance, tuple):
            raise ValueError(f"moe.moe_aux_loss_coeff={balance} must be one number: transformers has one loss of balance")
        sizes |= {"num_local_experts": config.moe.num_moe_experts, "num_experts_per_tok": config.moe.moe_router_topk}
        chosen = transformers.MixtralConfig(**sizes, output_router_logits=True, router_aux_loss_coef=balance)
    torch.manual_seed(0)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(chosen, attn_implementation="sdpa")
    rule = torch.optim.AdamW(theirs.parameters(), lr=optimizer.lr, weight_decay=optimizer.weight_decay)
    batches = _tokens(config)

    def step() -> float:
        total = 0.0
        for x in batches:
            inputs = x[:, :-1].contiguous()
            # Labels are shifted inside; the whole sequence goes in, so that as many tokens are predicted.
            loss = theirs(input_ids=inputs, labels=inputs).loss / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(theirs.parameters(), optimizer.clip_grad)
        rule.step()
        rule.zero_grad(set_to_none=True)
        return total

    return step, sum(parameter.numel() for parameter in theirs.parameters())
