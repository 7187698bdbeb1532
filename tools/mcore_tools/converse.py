# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Chat with a model at the terminal; answers appear as they are generated.

mcore chat runs/tuned                               # a run, a checkpoint or a Hugging Face folder, on this process
mcore chat http://127.0.0.1:8000                    # what `mcore serve`, or another OpenAI-compatible server, serves

/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer. A message of several lines begins and ends with three
quotation marks. Exit code: 0 done; 2 an input cannot be used, and why.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from mcore_ckpt import CheckpointingException
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, integer, number, secret
from mcore_tools.exit_code import exit_code
from mcore_tools.generate import add_model_arguments
from mcore_tools.serving import ONE_LORA, add_lora_argument, open_engine, read_lora
from mcore_tools.terminal import Answers, AnswerSettings, Conversation, EngineAnswers, ServerAnswers, StandardTerminal, Terminal
from mcore_tools.torchrun import report_error
from mcore_tools.training import device_of

_OF_ENGINES = ("max_length", "max_requests", "cache_gb", "kv_cache_dtype", "weight_dtype")
"""Options of ``add_model_arguments``."""


def _answers(options: argparse.Namespace) -> Answers:
    """Who answers: a server or an engine."""
    settings = AnswerSettings(max_tokens=options.max_tokens, temperature=options.temperature)
    if options.checkpoint.startswith(("http://", "https://")):
        if options.lora is not None:
            raise ValueError("--lora is for an engine of this process; at a server name the adapter by --model")
        for name in _OF_ENGINES:
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for an engine of this process, and {options.checkpoint} has its own; leave it out"
                )
        token = options.token_file or ""
        return ServerAnswers(options.checkpoint, settings, model=options.model, token=token)
    if options.model or options.token_file is not None:
        raise ValueError(f"--model and --token-file are for a server, and {options.checkpoint} is no http:// address; leave them out")
    loras = {} if options.lora is None else {ONE_LORA: read_lora(options.checkpoint, options.lora)}
    device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    return EngineAnswers(
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
        settings,
        next(iter(loras), None),
    )


@quiet_pipe
def main(arguments: Sequence[str] | None = None, terminal: Terminal | None = None) -> int:
    """The command; ``terminal`` is None for standard input and output."""
    parser = Parser("mcore chat", __doc__)
    add_model_arguments(parser)
    add_lora_argument(parser)
    parser.add_argument("--system", default="", help="what the model is told first")
    parser.add_argument("--max-tokens", type=integer(1), default=512, help="of an answer (default: 512)")
    parser.add_argument("--temperature", type=number(least=0), default=0.7, help="of an answer; 0 for the likeliest token (default: 0.7)")
    parser.add_argument("--model", default="", help="name of the model at a server (default: its first)")
    parser.add_argument("--token-file", metavar="FILE", type=secret, help="file with the secret that a server wants")
    options = parser.parse_args(arguments)
    try:
        answers = _answers(options)
    except (ValueError, OSError, CheckpointingException) as error:
        report_error(str(error))
        return exit_code(error)
    shown = StandardTerminal() if terminal is None else terminal
    shown.write("/help lists commands\n")
    Conversation(answers, shown, options.system).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
