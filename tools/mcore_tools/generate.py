# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Continue prompts with the model of a checkpoint or a Hugging Face folder.

mcore generate runs/moe_tiny/checkpoints --prompt "def main" --prompt "import"

The folder of a run, of its steps (the newest is taken), one checkpoint that keeps ``run.yaml`` and a tokenizer, or a Hugging Face folder.
With --tp N and --pp M the model is split over N x M processes, one a GPU, which are started here or by torchrun.
Exit code: 0 done; 1 something was refused, and why.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch

from mcore_ckpt import CheckpointingException
from mcore_inference import DynamicInferenceEngine, FinishReason, SamplingParams
from mcore_tools.arguments import Parser, integer, number
from mcore_tools.serving import PROGRAM, EngineLayout, EngineRanks, open_engine, served_length, served_model, speculating
from mcore_tools.torchrun import report_error
from mcore_tools.training import device_of

_NUM_TOKENS = 64
"""Of a continuation, where nothing is said."""


def generate(engine: DynamicInferenceEngine, prompts: Sequence[str], *, max_tokens: int | None, temperature: float) -> int:
    """Print each prompt with its continuation, on the first rank of the engine; 1 when one was refused.

    A continuation that the engine's length cuts is said to be cut. ``max_tokens`` is None for 64, or as many as there is room for.
    """
    longest = engine.context.max_sequence_length
    params = SamplingParams(temperature=temperature, num_tokens_to_generate=min(_NUM_TOKENS, longest) if max_tokens is None else max_tokens)
    # All ranks make the same calls, and get the same tokens.
    records = engine.generate(list(prompts), params)
    if not engine.model.groups.tp_pp.is_first:
        return 0
    for prompt, record in zip(prompts, records, strict=True):
        if record.error is None:
            print(prompt + record.generated_text)
            if record.requests[0].budget_clamped and record.finish_reason is FinishReason.LENGTH:
                print(f"cut at {longest} tokens of prompt and continuation; raise --max-length for more", file=sys.stderr)
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
    parser.add_argument(
        "--weight-dtype", choices=("fp8", "fp8_weight_only"), help="of linear layers and experts (default: that of the model)"
    )


def add_split_argument(parser: argparse.ArgumentParser) -> None:
    """Over how many devices."""
    parser.add_argument(
        "--tp", metavar="N", type=integer(1), default=1, help="split the model over N processes, one a GPU (tensor parallelism; default: 1)"
    )
    parser.add_argument(
        "--pp", metavar="M", type=integer(1), default=1, help="and its layers over M stages, each of --tp processes (default: 1)"
    )


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """Who proposes tokens that the model verifies several at a time."""
    parser.add_argument(
        "--speculation",
        metavar="WHO",
        help="verify several proposed tokens a step, which stay the same: ngram (from the text before), mtp (the model's own heads), or "
        "the folder of a draft head that `mcore eagle export` wrote (default: one token a step)",
    )
    parser.add_argument(
        "--speculation-tokens", metavar="N", type=integer(1, 64), help="proposed a step (default: 4; of mtp as many as there are heads)"
    )


@contextlib.contextmanager
def opened(
    verb: str, words: Sequence[str], options: argparse.Namespace, *, num_sharing: int = 1
) -> Iterator[tuple[DynamicInferenceEngine, EngineRanks | None]]:
    """The engine of a command, and the ranks that it is split over, or shares its experts with; None where it is alone."""
    with contextlib.ExitStack() as stack:
        choice = options.speculation
        if choice is None and options.speculation_tokens is not None:
            raise ValueError("--speculation-tokens needs --speculation, which says who proposes them")
        if options.max_tokens is not None and options.max_tokens > (longest := options.max_length or served_length(options.checkpoint)):
            raise ValueError(
                f"--max-tokens {options.max_tokens} exceeds the {longest} tokens of a prompt and its continuation; lower it, or raise "
                "--max-length"
            )
        layout = EngineLayout(tp=options.tp, pp=options.pp, num_sharing=num_sharing)
        ranks = None if layout.num_ranks == 1 else EngineRanks(layout, [*PROGRAM, verb, *words])
        if ranks is not None:
            # Settings and tokenizer are read a second time, so that no process is started for a model that cannot be split so. Ranks
            # that are there already find out when they build it.
            if ranks.starts_others:
                layout.check(*served_model(options.checkpoint))
            stack.enter_context(ranks)
        device = device_of("cuda" if torch.cuda.is_available() else "cpu")
        engine = open_engine(
            options.checkpoint,
            device,
            max_length=options.max_length,
            cache_gb=options.cache_gb,
            kv_cache_dtype=options.kv_cache_dtype,
            weight_dtype=options.weight_dtype,
            groups=None if ranks is None else ranks.groups,
            execution=None
            if choice is None
            else lambda config, groups: speculating(choice, options.speculation_tokens, config, groups, device),
        )
        if ranks is not None:
            ranks.meet("loaded")
        yield engine, ranks


def add_sampling_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """What is continued, and how."""
    parser.add_argument("--prompt", action="append", default=[], required=required, help="continue this text; may be given again")
    parser.add_argument("--max-tokens", type=integer(1), help="of a continuation (default: 64)")
    parser.add_argument("--temperature", type=number(least=0), default=0.0, help="of a continuation (default: 0, the likeliest token)")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore generate", __doc__)
    add_model_arguments(parser)
    add_split_argument(parser)
    add_speculation_arguments(parser)
    add_sampling_arguments(parser, required=True)
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    try:
        with opened("generate", words, options) as (engine, ranks):
            code = generate(engine, options.prompt, max_tokens=options.max_tokens, temperature=options.temperature)
            if ranks is not None:
                ranks.leave(engine, code)
        return code
    except (ValueError, OSError, CheckpointingException) as error:
        report_error(str(error))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
