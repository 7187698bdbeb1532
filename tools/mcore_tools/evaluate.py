# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Measure a model: the perplexity of text, multiple choice, or tasks of lm-evaluation-harness.

mcore eval runs/sft/hf --text notes.txt --text held-out.jsonl
mcore eval Qwen3-0.6B --choices questions.jsonl
mcore eval Qwen3-0.6B --tasks hellaswag,arc_easy --limit 200        # pip install "mcore-tools[eval]"

The model is a folder as of ``mcore generate``. Prints one JSON object. Exit code: 0 done; 1 failed, 2 an input cannot be used, and why.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from mcore_ckpt import CheckpointingException
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, file, folder, integer, new_file
from mcore_tools.evaluation import Scorer, read_choices, read_texts, score_choices, score_texts
from mcore_tools.exit_code import exit_code, under_way
from mcore_tools.generate import add_model_arguments
from mcore_tools.serving import ONE_LORA, add_lora_argument, open_engine, read_lora, served_length
from mcore_tools.torchrun import report_error
from mcore_tools.training import device_of


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore eval", __doc__)
    add_model_arguments(parser)
    add_lora_argument(parser)
    parser.add_argument(
        "--text", metavar="FILE", type=file, action="append", default=[], help="text to predict; of a .jsonl the field text of each line"
    )
    parser.add_argument("--stride", type=integer(1), help="tokens that a window of a long text predicts (default: half of --max-length)")
    parser.add_argument(
        "--choices", metavar="FILE", type=file, help=".jsonl with question, choices and answer (number of the right choice, from 0)"
    )
    parser.add_argument("--tasks", help="tasks of lm-evaluation-harness, separated by commas")
    parser.add_argument("--include", metavar="FOLDER", type=folder, help="folder with tasks of your own for --tasks")
    parser.add_argument("--limit", type=integer(1), help="questions of each task (default: all)")
    parser.add_argument("--output", metavar="FILE", type=new_file, help="file for the JSON object, too")
    options = parser.parse_args(arguments)
    try:
        results = _evaluate(options)
        text = json.dumps(results, indent=1)
        if options.output is not None:
            with under_way():
                options.output.write_text(text + "\n", encoding="utf-8")
    except (ValueError, OSError, CheckpointingException) as error:
        report_error(str(error))
        return exit_code(error)
    print(text)
    return 0


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, by its option; everything is read before the model is loaded."""
    if not (options.text or options.choices or options.tasks):
        raise ValueError("there is nothing to measure; give --text FILE, --choices FILE or --tasks NAMES")
    for flag, value, used, needs in (
        ("--stride", options.stride, options.text, "--text"),
        ("--include", options.include, options.tasks, "--tasks"),
        ("--limit", options.limit, options.tasks, "--tasks"),
    ):
        if value is not None and not used:
            raise ValueError(f"{flag} is of {needs}; give both, or leave it out")
    if options.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ValueError('--tasks needs lm-evaluation-harness, which is not installed: pip install "mcore-tools[eval]"')
    texts = read_texts(options.text) if options.text else []
    questions = read_choices(options.choices) if options.choices else []
    if texts and options.stride is not None:
        length = options.max_length or served_length(options.checkpoint)
        if options.stride >= length:
            raise ValueError(f"--stride {options.stride} must be below the length of {length} tokens; lower it, or raise --max-length")
    tasks = None
    if options.tasks:
        from mcore_tools.evaluation.harness import Tasks

        tasks = Tasks([name for name in options.tasks.split(",") if name], include=options.include)
    loras = {} if options.lora is None else {ONE_LORA: read_lora(options.checkpoint, options.lora)}
    device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    scorer = Scorer(
        open_engine(
            options.checkpoint,
            device,
            max_length=options.max_length,
            max_requests=options.max_requests,
            cache_gb=options.cache_gb,
            kv_cache_dtype=options.kv_cache_dtype,
            weight_dtype=options.weight_dtype,
            loras=loras,
        ),
        next(iter(loras), None),
    )
    results: dict[str, Any] = {}
    with under_way():
        if texts:
            measured = score_texts(scorer, texts, stride=options.stride)
            results["text"] = {
                **dataclasses.asdict(measured),
                "loss": measured.loss,
                "perplexity": measured.perplexity,
                "bits_per_byte": measured.bits_per_byte,
            }
        if questions:
            results["choices"] = dataclasses.asdict(score_choices(scorer, questions))
        if tasks is not None:
            results["tasks"] = tasks.run(scorer, limit=options.limit, log=lambda line: print(line, file=sys.stderr))
    return results


if __name__ == "__main__":
    raise SystemExit(main())
