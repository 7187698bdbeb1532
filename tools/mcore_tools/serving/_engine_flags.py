# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How an engine runs, by the flags of a command line: fields of ``InferenceConfig`` and ``ExecutionConfig``."""

import argparse
from typing import Any

import torch

from mcore_inference import ExecutionConfig, InferenceConfig
from mcore_tools.arguments import add_fields, given_flags, option_name
from mcore_tools.serving._engine import default_requests
from mcore_tools.serving._loras import lora_slots

_SIZES = {
    "--max-step-tokens": ("max_tokens", "of one step, which bounds how long a prompt delays the others (default: 8192)"),
    "--block-size": ("block_size_tokens", "tokens of a cache block (default: 64 on a GPU, 16 on a CPU)"),
    "--prefix-caching": ("enable_prefix_caching", "share equal beginnings of hybrid models too, by snapshots of their states"),
    "--no-prefix-caching": (
        "enable_prefix_caching",
        "share no blocks of equal beginnings (default: shared where every layer is attention)",
    ),
    "--prefix-caching-mamba-gb": (
        "prefix_caching_mamba_gb",
        "GiB of the cache for snapshots of recurrent states (default: as many as requests, in a quarter of it)",
    ),
    "--no-chunked-prefill": ("enable_chunked_prefill", "compute each prompt in one step (default: long ones over several)"),
    "--unified-memory-level": (
        "unified_memory_level",
        "0: a suspended engine computes its cache again; 1: it moves to the host; 2: tensors of steps too (default: 0)",
    ),
}
_EXECUTION = {
    "--num-cuda-graphs": ("num_cuda_graphs", "numbers of rows that are recorded (default: about 25)"),
    "--log-interval-steps": ("log_interval_steps", "steps of one line of JSON on standard error (default: no lines)"),
}
_FLAGS = (*_SIZES, *_EXECUTION, "--attention-backend")
_BACKENDS = ("triton", "torch", "flash_attn_3", "flashinfer")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What an operator turns."""
    add_fields(parser, _SIZES, InferenceConfig)
    add_fields(parser, _EXECUTION, ExecutionConfig)
    parser.add_argument(
        "--attention-backend", choices=_BACKENDS, help="who computes attention (default: this package's kernels where they can, else torch)"
    )


def engine_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``InferenceConfig`` that were given.

    Raises:
        ValueError: steps of fewer tokens than requests, or prefix caching both on and off.
    """
    if options.prefix_caching and options.no_prefix_caching is False:
        raise ValueError("--prefix-caching and --no-prefix-caching exclude each other; leave one out")
    requests = options.max_requests or default_requests(on_gpu=torch.cuda.is_available())
    if options.max_step_tokens is not None and options.max_step_tokens < requests:
        raise ValueError(
            f"--max-step-tokens {options.max_step_tokens} is less than the {requests} requests of a step; raise it, or lower --max-requests"
        )
    slots = lora_slots(options)
    return {_SIZES[flag][0]: value for flag, value in given_flags(options, _SIZES)} | ({} if slots is None else {"lora": slots})


def engine_execution(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ExecutionConfig`` that were given."""
    return {_EXECUTION[flag][0]: value for flag, value in given_flags(options, _EXECUTION)}


def engine_option_names() -> list[str]:
    """Names of the options of ``add_engine_arguments``."""
    return [option_name(flag) for flag in _FLAGS]
