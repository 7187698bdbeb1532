# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A small Llama on a CPU: the engine beside ``generate`` of transformers, with the same weights, in one process and by turns.

python -m tools.bench.serve_cpu --output docs/benchmarks/serve_cpu.json

Prompts of random tokens are continued greedily to a fixed number of tokens, in float32. The tokens of both are compared; a row has the
median of the rounds, its spread, and output tokens/s over those of transformers.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_inference import SamplingParams
from mcore_parallel.data import train_bpe
from mcore_tools.serving import open_engine
from tools.bench._record import record

_SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}  # fmt: skip


def build(folder: Path) -> tuple[Any, Any]:
    """Our engine and the model of transformers, with equal weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_bpe(["the engine beside generate of transformers. " * 20], 300, folder)
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(**_SIZES, vocab_size=tokenizer.vocab_size, initializer_range=0.1, eos_token_id=None, pad_token_id=0)
    ).eval()
    theirs.save_pretrained(folder)
    return open_engine(folder, "cpu", max_length=512, cache_gb=0.25), theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--lengths", type=int, nargs=2, default=[64, 128], help="tokens of a prompt, and new ones")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_prompt, num_new = options.lengths
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, model = build(Path(folder))
        settings = SamplingParams(temperature=0, num_tokens_to_generate=num_new, ignore_eos=True)
        for num_requests in options.requests:
            draw = random.Random(num_requests)
            rounds: dict[str, list[float]] = {"mcore": [], "transformers": []}
            for number in range(options.rounds + 1):
                # Others in each round: nothing is cached.
                prompts = [[draw.randrange(engine.vocab_size) for _ in range(num_prompt)] for _ in range(num_requests)]

                def ours(prompts: list[list[int]] = prompts) -> list[list[int]]:
                    return [record.generated_tokens for record in engine.generate(prompts, settings)]

                @torch.no_grad()
                def theirs(prompts: list[list[int]] = prompts) -> list[list[int]]:
                    tokens = torch.tensor(prompts)
                    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_new, do_sample=False)
                    return out[:, num_prompt:].tolist()

                results = {name: _timed(run) for name, run in (("mcore", ours), ("transformers", theirs))}
                assert results["mcore"][0] == results["transformers"][0], "both have the same weights"
                if number:
                    for name, (_, seconds) in results.items():
                        rounds[name].append(seconds)
            for name, seconds in rounds.items():
                middle, peer = statistics.median(seconds), statistics.median(rounds["transformers"])
                rows.append(
                    {
                        "by": name, "requests": num_requests, "inputs": num_prompt, "outputs": num_new, "threads": options.threads,
                        "ms": round(middle * 1e3, 1), "min_ms": round(min(seconds) * 1e3, 1), "max_ms": round(max(seconds) * 1e3, 1),
                        "out_tok_s": round(num_requests * num_new / middle), "ratio": round(peer / middle, 2),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    if options.output is not None:
        record(options.output, {"work": "greedy generation on a CPU, float32, random weights", "model": _SIZES, "rows": rows})


def _timed(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    begin = time.perf_counter()
    return run(), time.perf_counter() - begin


if __name__ == "__main__":
    main()
