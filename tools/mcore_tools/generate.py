# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Continue prompts with the model of a checkpoint or a Hugging Face folder.

mcore generate runs/moe_tiny/checkpoints --prompt "def main" --prompt "import"
mcore generate path/to/Qwen3-0.6B --input prompts.jsonl --output texts.jsonl --max-tokens 256

The folder of a run, of its steps (the newest is taken), one checkpoint that keeps ``run.yaml`` and a tokenizer, or a Hugging Face folder.
With --tp N and --pp M the model is split over N x M processes, one a GPU, which are started here or by torchrun. USE_COORDINATOR=1 in
the environment puts the engine into a process of its own, behind a coordinator as of `mcore serve --data-parallel`.
--input has a prompt a line, or JSON objects with a "prompt" or the "messages" of a chat (.jsonl). --output gets a JSON object a line, in
the order in which they end; the same command again goes on with the prompts that it has not, and draws what it would have drawn. Prompts
of a step that failed are among those. What the texts depend on is kept beside it, in FILE.settings.json: a command with other settings is
refused.
Exit code: 0 done; 1 failed, or a prompt was refused or is left to the same command; 2 an input cannot be used, and why; 75 the engine
failed several times in a row, or hangs.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt import CheckpointingException
from mcore_inference import (
    CoordinatorError,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    EngineDeadError,
    EngineLostError,
    EngineRunner,
    ExecutionConfig,
    ExpertBalancing,
    FinishReason,
    LoraWeights,
    RequestError,
    UnifiedMemoryUnsupportedError,
)
from mcore_inference.coordinator import CoordinatedRunner
from mcore_parallel import ProcessGroups
from mcore_parallel.guard import STALLED_EXIT_CODE
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, file, integer, number
from mcore_tools.exit_code import exit_code, under_way
from mcore_tools.recipes import RunConfig
from mcore_tools.serving import (
    LORA_OPTIONS,
    NUM_TOKENS,
    ONE_LORA,
    PROGRAM,
    EngineLayout,
    EngineRanks,
    Outcome,
    PromptFile,
    add_engine_arguments,
    add_lora_argument,
    add_sampling_arguments,
    add_score_arguments,
    chat_encoder,
    check_scores,
    continue_prompts,
    coordinated,
    end_process,
    engine_execution,
    engine_option_names,
    engine_sizes,
    lora_address,
    open_engine,
    open_served_tokenizer,
    params_of,
    read_lora,
    sampling_params,
    sampling_settings,
    served_address,
    served_length,
    served_model,
    settle_lora_slots,
    speculating,
    uses_coordinator,
)
from mcore_tools.torchrun import report_error
from mcore_tools.training import device_of

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_ENGINE_OPTIONS = (
    "cache_gb", "max_requests", "tp", "pp", "max_length", "kv_cache_dtype", "weight_dtype", "speculation", "speculation_tokens",
    "redundant_experts", "rebalance_steps", *LORA_OPTIONS,
)  # fmt: skip
"""That an engine in a process of its own gets, beside those of ``add_engine_arguments``."""


def generate(engine: DynamicInferenceEngine, options: argparse.Namespace) -> int:
    """Print each prompt of ``add_sampling_arguments`` with its continuation, on the first rank of the engine; 1 when one was refused.

    A continuation that the engine's length cuts is said to be cut.
    """
    longest = engine.context.max_sequence_length
    # All ranks make the same calls, and get the same tokens.
    params = sampling_params(options, longest)
    each = [params_of(params, number) for number in range(len(options.prompt))]
    records = engine.generate(list(options.prompt), each, lora=_lora_of(options))
    if not engine.model.groups.tp_pp.is_first:
        return 0
    return _show(_repeated(options), records, longest)


def continue_coordinated(options: argparse.Namespace) -> int:
    """Print each prompt with its continuation, by an engine behind a coordinator."""
    check_length(options)
    results: dict[int, Outcome] = {}
    with _coordinated_runner(options) as runner:
        longest = runner.max_sequence_length
        params = sampling_params(options, longest)
        continue_prompts(runner, dict(enumerate(options.prompt)), params, results.__setitem__, lora=_lora_of(options))
    shown: list[DynamicInferenceRequestRecord | RequestError] = []
    for _, result in sorted(results.items()):
        shown += [result] * params.n if isinstance(result, RequestError) else result
    return _show(_repeated(options), shown, longest)


def _lora_of(options: argparse.Namespace) -> str | None:
    """Name of the adapter that prompts go through."""
    return next(iter(options.loras), None)


def _repeated(options: argparse.Namespace) -> list[str]:
    """The prompt of each continuation."""
    return [prompt for prompt in options.prompt for _ in range(options.n or 1)]


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """By flag, what the texts of a file depend on."""
    return {
        "checkpoint": served_address(options.checkpoint),
        "--max-length": options.max_length,
        **sampling_settings(options),
        "--weight-dtype": options.weight_dtype,
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--lora": None if options.lora is None else lora_address(options.lora),
    }


def _show(prompts: Sequence[str], results: Sequence[DynamicInferenceRequestRecord | RequestError], longest: int) -> int:
    """Print them; 1 when one was refused."""
    errors = [result if isinstance(result, RequestError) else result.error for result in results]
    for prompt, result, error in zip(prompts, results, errors, strict=True):
        if isinstance(result, RequestError) or error is not None:
            print(f"error: {error}", file=sys.stderr)
            continue
        print(prompt + result.generated_text)
        if result.requests[0].budget_clamped and result.finish_reason is FinishReason.LENGTH:
            print(f"cut at {longest} tokens of prompt and continuation; raise --max-length for more", file=sys.stderr)
    return 1 if any(error is not None for error in errors) else 0


@contextlib.contextmanager
def _coordinated_runner(options: argparse.Namespace) -> Iterator[CoordinatedRunner]:
    """Over one engine in a process of its own."""
    layout = EngineLayout(tp=options.tp, pp=options.pp, num_sharing=1)
    layout.check(*served_model(options.checkpoint), balancing_of(options))
    with coordinated(engine_words(options), count=1, layout=layout) as run:
        assert run is not None, "nobody stops it"
        with run() as runner:
            load_loras(runner, options.loras)
            yield runner


def load_loras(runner: CoordinatedRunner, loras: Mapping[str, LoraWeights]) -> None:
    """Load adapters into all engines.

    Raises:
        LoraLoadError: one of them does not fit.
        CoordinatorError: the engines are gone.
    """

    async def load() -> None:
        for name, weights in loras.items():
            await runner.load_lora(name, weights)

    asyncio.run(load())


def engine_words(options: argparse.Namespace, *more: str) -> list[str]:
    """The command of an engine like that of these options, which `coordinated` starts."""
    words = [*PROGRAM, "serve", options.checkpoint, *more]
    for name in (*_ENGINE_OPTIONS, *engine_option_names()):
        value = getattr(options, name)
        if value is not None and not (name in ("tp", "pp") and value == 1):
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if isinstance(value, bool) else [flag, str(value)]
    return words


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What an engine is made of."""
    parser.add_argument("checkpoint", help="folder of a run, of its steps, a checkpoint, or a Hugging Face folder")
    parser.add_argument(
        "--max-length",
        type=integer(2),
        help="tokens of prompt and continuation (default: what the run trained on, or the context of the model up to 4096)",
    )
    parser.add_argument(
        "--cache-gb", type=number(above=0), help="memory for keys and values (default: what a GPU has left of nine tenths; 1 on a CPU)"
    )
    parser.add_argument(
        "--max-requests", type=integer(1, 8192), help="computed at a time; others wait (default: 256 on a GPU, 64 on a CPU)"
    )
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


def add_expert_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the experts of a mixture lie."""
    parser.add_argument(
        "--redundant-experts",
        metavar="N",
        type=integer(0, 2**20),
        help="copies of the busiest experts of each layer, over all ranks that share them, which move by their loads (default: none, and "
        "no expert moves)",
    )
    parser.add_argument(
        "--rebalance-steps",
        metavar="N",
        type=integer(1, 2**31),
        help="steps after which experts move; without --redundant-experts they change places only (default: 3000)",
    )


def balancing_of(options: argparse.Namespace) -> ExpertBalancing | None:
    """How experts move, by the flags; None where they stay."""
    given = {"num_redundant_experts": options.redundant_experts, "interval_steps": options.rebalance_steps}
    given = {name: value for name, value in given.items() if value is not None}
    return ExpertBalancing(**given) if given else None


def check_length(options: argparse.Namespace) -> None:
    """Refuse, before a model is loaded, proposals by nobody, continuations that never fit, and settings that exclude each other."""
    if options.speculation is None and options.speculation_tokens is not None:
        raise ValueError("--speculation-tokens needs --speculation, which says who proposes them")
    if options.max_tokens is not None and options.max_tokens > (longest := options.max_length or served_length(options.checkpoint)):
        raise ValueError(
            f"--max-tokens {options.max_tokens} exceeds the {longest} tokens of a prompt and its continuation; lower it, or raise "
            "--max-length"
        )
    sampling_params(options, options.max_tokens or NUM_TOKENS)
    engine_sizes(options)


@contextlib.contextmanager
def opened(
    verb: str, words: Sequence[str], options: argparse.Namespace, *, num_sharing: int = 1
) -> Iterator[tuple[DynamicInferenceEngine, EngineRanks | None]]:
    """The engine of a command, and the ranks that it is split over, or shares its experts with; None where it is alone."""
    with contextlib.ExitStack() as stack:
        check_length(options)
        layout = EngineLayout(tp=options.tp, pp=options.pp, num_sharing=num_sharing)
        ranks = None if layout.num_ranks == 1 else EngineRanks(layout, [*PROGRAM, verb, *words])
        if ranks is not None:
            # Settings and tokenizer are read a second time, so that no process is started for a model that cannot be split so. Ranks
            # that are there already find out when they build it.
            if ranks.starts_others:
                layout.check(*served_model(options.checkpoint), balancing_of(options))
            stack.enter_context(ranks)
            if options.loras:
                ranks.check_adapters(options.loras)
        device = device_of("cuda" if torch.cuda.is_available() else "cpu")
        try:
            engine = open_engine(
                options.checkpoint,
                device,
                max_length=options.max_length,
                max_requests=options.max_requests,
                cache_gb=options.cache_gb,
                kv_cache_dtype=options.kv_cache_dtype,
                weight_dtype=options.weight_dtype,
                groups=None if ranks is None else ranks.groups,
                execution=lambda config, groups: _execution(options, config, groups, device),
                sizes=engine_sizes(options),
                attention_backend=options.attention_backend,
                loras=options.loras,
            )
        except UnifiedMemoryUnsupportedError as error:
            raise ValueError(f"--unified-memory-level {options.unified_memory_level}: {error}") from error
        if ranks is not None:
            ranks.meet("loaded")
        yield engine, ranks


def _execution(options: argparse.Namespace, config: RunConfig, groups: ProcessGroups, device: torch.device | str) -> ExecutionConfig:
    choice, execution = options.speculation, ExecutionConfig()
    if choice is not None:
        execution = speculating(choice, options.speculation_tokens, config, groups, device)
    return dataclasses.replace(execution, expert_balancing=balancing_of(options), **engine_execution(options))


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """What is continued, and how."""
    parser.add_argument("--prompt", action="append", default=[], help="continue this text; may be given again")
    add_sampling_arguments(parser)


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore generate", __doc__)
    add_model_arguments(parser)
    add_split_argument(parser)
    add_speculation_arguments(parser)
    add_expert_arguments(parser)
    add_engine_arguments(parser)
    add_prompt_arguments(parser)
    add_score_arguments(parser)
    add_lora_argument(parser)
    parser.add_argument("--input", metavar="FILE", type=file, help="continue the prompts of a file: a line each, or objects (.jsonl)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="where the continuations of --input go; what it has is not done again")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    if not options.prompt and options.input is None:
        parser.error("give --prompt, or --input and --output")
    if (options.input is None) != (options.output is None) or (options.prompt and options.input is not None):
        parser.error("--input and --output go together, without --prompt")
    if options.log_interval_steps is not None:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        options.loras = {} if options.lora is None else {ONE_LORA: read_lora(options.checkpoint, options.lora)}
        settle_lora_slots(options, options.loras)
        if options.input is None:
            check_scores(options)
            return _continue(options, words, None)
        # Of several ranks the first has the texts; without WORLD_SIZE this process starts the others, and an engine of one rank has none.
        is_first = options.tp * options.pp == 1 or "WORLD_SIZE" not in os.environ or int(os.environ.get("RANK", "0")) == 0
        with PromptFile(options.input, options.output, _settings(options), writes=is_first) as prompts:
            return _continue(options, words, prompts)
    except (ValueError, OSError, CheckpointingException, CoordinatorError, EngineLostError) as error:
        report_error(str(error))
        return exit_code(error)


def _continue(options: argparse.Namespace, words: Sequence[str], prompts: PromptFile | None) -> int:
    """What the options ask for; the exit status."""
    if prompts is not None and not prompts.left:
        return 0 if prompts.has_all_texts else 1
    if uses_coordinator():
        return continue_coordinated(options) if prompts is None else _continue_file_coordinated(options, prompts)
    with opened("generate", words, options) as (engine, ranks):
        if prompts is None:
            code = generate(engine, options)
        elif ranks is not None and not engine.model.groups.tp_pp.is_first:
            code = ranks.follow(engine)
        else:
            code = _continue_file(engine, options, prompts)
        if ranks is not None:
            ranks.leave(engine, code)
    return code if ranks is None else end_process(code)


def _continue_file(engine: DynamicInferenceEngine, options: argparse.Namespace, prompts: PromptFile) -> int:
    params = sampling_params(options, engine.context.max_sequence_length)
    assert engine.tokenizer is not None, "of a checkpoint or a folder"
    try:
        with under_way(), EngineRunner(engine) as runner:
            prompts.run(runner, params, chat_encoder(engine.tokenizer), _lora_of(options))
    except EngineDeadError as error:
        print(f"error: {error}; the same command goes on where this one ended", file=sys.stderr)
        return STALLED_EXIT_CODE
    return 0 if prompts.has_all_texts else 1


def _continue_file_coordinated(options: argparse.Namespace, prompts: PromptFile) -> int:
    check_length(options)
    with _coordinated_runner(options) as runner, under_way():
        encode = chat_encoder(open_served_tokenizer(options.checkpoint))
        prompts.run(runner, sampling_params(options, runner.max_sequence_length), encode, _lora_of(options))
    return 0 if prompts.has_all_texts else 1


if __name__ == "__main__":
    raise SystemExit(main())
