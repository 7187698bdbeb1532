# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Continue prompts with the model of a checkpoint or a Hugging Face folder.

mcore generate runs/moe_tiny/checkpoints --prompt "def main" --prompt "import"

The folder of a run, of its steps (the newest is taken), one checkpoint that keeps ``run.yaml`` and a tokenizer, or a Hugging Face folder.
Exit code: 0 done; 1 something was refused, and why.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from mcore_ckpt import CheckpointingException
from mcore_inference import DynamicInferenceEngine, SamplingParams
from mcore_tools.arguments import Parser, integer, number
from mcore_tools.serving import open_engine
from mcore_tools.training import device_of


def generate(engine: DynamicInferenceEngine, prompts: Sequence[str], *, max_tokens: int, temperature: float) -> int:
    """Print each prompt with its continuation; 1 when one was refused."""
    params = SamplingParams(temperature=temperature, num_tokens_to_generate=max_tokens)
    records = engine.generate(list(prompts), params)
    for prompt, record in zip(prompts, records, strict=True):
        if record.error is None:
            print(prompt + record.generated_text)
        else:
            print(f"error: {record.error}", file=sys.stderr)
    return 1 if any(record.error is not None for record in records) else 0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What an engine is made of."""
    parser.add_argument("checkpoint", help="folder of a run, of its steps, a checkpoint, or a Hugging Face folder")
    parser.add_argument(
        "--max-length",
        type=integer(2),
        help="tokens of prompt and continuation (default: what the run trained on, or the context of the model up to 4096)",
    )
    parser.add_argument("--cache-gb", type=number(above=0), default=1.0, help="memory for keys and values (default: 1)")
    parser.add_argument("--kv-cache-dtype", choices=("fp8",), help="of keys and values (default: that of the model)")


def add_sampling_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """What is continued, and how."""
    parser.add_argument("--prompt", action="append", default=[], required=required, help="continue this text; may be given again")
    parser.add_argument("--max-tokens", type=integer(1), default=64, help="of a continuation (default: 64)")
    parser.add_argument("--temperature", type=number(least=0), default=0.0, help="of a continuation (default: 0, the likeliest token)")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore generate", __doc__)
    add_model_arguments(parser)
    add_sampling_arguments(parser, required=True)
    options = parser.parse_args(arguments)
    try:
        device = device_of("cuda" if torch.cuda.is_available() else "cpu")
        engine = open_engine(
            options.checkpoint, device, max_length=options.max_length, cache_gb=options.cache_gb, kv_cache_dtype=options.kv_cache_dtype
        )
        return generate(engine, options.prompt, max_tokens=options.max_tokens, temperature=options.temperature)
    except (ValueError, OSError, CheckpointingException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
