# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A GRPO step by TRL, vLLM on the same GPUs: the peer of ``tools.bench.rl``. Random weights, prompts and rewards as there.

python -m tools.bench.rl_trl --model llama-1b
accelerate launch --config_file fsdp2.yaml --num_processes 2 -m tools.bench.rl_trl --model qwen3-8b --groups 16 --outputs 512 \\
    --micro-batch 2 --checkpoint --sleep
python -m tools.bench.rl_trl --model tiny --size tiny --device cpu

One JSON line a step, the first with everything that is made once; the last counts. Every answer has its full length, no forward pass comes
before the loss, texts are not made by vLLM, and its memory is as much as its weights and the keys and values of all answers need. Weights
and state of the optimizer are float32 and computed with in bfloat16, unless ``--dtype bfloat16``. On a CPU transformers generates. It needs
trl, and vllm on a GPU.
"""

import argparse
import dataclasses
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mcore_parallel.models import TransformerConfig
from tools.bench.rl import SIZES, Clock, EvenShare, Work, even_share
from tools.bench.serve import MODELS

_RANK, _RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
_ROOM = 6 * 2**30
"""Bytes of vLLM's beside weights, keys and values: activations, log-probabilities, recorded graphs."""
_ENDS = ("<pad>", "<eos>")
"""Words of the last two ids; every other word is its id."""


def write_model(config: TransformerConfig, folder: Path, device: torch.device, positions: int) -> None:
    """Random weights in bfloat16 as transformers and vLLM read them, with a tokenizer whose texts are ids between blanks.

    Args:
        config: of a dense model with rotary embedding.
        folder: to write to.
        device: that draws the weights.
        positions: most tokens of a prompt and its answer.
    """
    transformers, tokenizers = importlib.import_module("transformers"), importlib.import_module("tokenizers")
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.share_embeddings_and_output_weights, "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.rotary_base)},
        "pad_token_id": config.vocab_size - 2, "bos_token_id": None, "eos_token_id": config.vocab_size - 1,
    }  # fmt: skip
    family = transformers.Qwen3Config if config.qk_layernorm else transformers.LlamaConfig
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(family(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    pad, eos = _ENDS
    words = {str(number): number for number in range(config.vocab_size - 2)} | {pad: config.vocab_size - 2, eos: config.vocab_size - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=pad))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos).save_pretrained(folder)


def vllm_share(config: TransformerConfig, folder: Path, work: Work, total: int) -> float:
    """Of a GPU's memory, for weights and one cache with all answers of a rank.

    Args:
        config: of the model.
        folder: with its weights.
        work: of all ranks.
        total: bytes of the GPU.
    """
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tokens = work.groups * work.group_size // _RANKS * (work.inputs + work.outputs)
    cache = 2 * 2 * config.num_layers * config.kv_heads * config.head_dim * tokens
    return (weights + 1.1 * cache + _ROOM) / total


@dataclasses.dataclass(kw_only=True)
class Spans:
    """Seconds of calls in a step."""

    clock: Clock
    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            results: list[Any] = []
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock(lambda: results.append(work(*args, **kwargs)))
            return results[0]

        return run


def run_steps(arguments: argparse.Namespace, work: Work, device: torch.device, folder: Path) -> None:
    """Train, and print a line a step.

    Args:
        arguments: of the command.
        work: of a step over all ranks.
        device: of this rank.
        folder: with the model.
    """
    trl, transformers, datasets = (importlib.import_module(name) for name in ("trl", "transformers", "datasets"))
    config, cuda = MODELS[arguments.model], device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else 0
    count = work.groups * work.group_size
    micro_batch = min(arguments.micro_batch or (8 if total > 100 * 2**30 else 4), count // _RANKS)
    agent = EvenShare(config.vocab_size - 2, work.inputs)
    prompts = [agent.problem(number).prompt for number in range(work.groups * arguments.steps)]
    generation: dict[str, Any] = {"min_new_tokens": work.outputs}
    if cuda:
        # Texts for rewards are made from ids by the trainer.
        generation = {"ignore_eos": True, "detokenize": False}
    chosen: dict[str, Any] = {}
    if cuda:
        chosen = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": work.inputs + work.outputs,
            "vllm_gpu_memory_utilization": round(vllm_share(config, folder, work, total), 3), "vllm_enable_sleep_mode": arguments.sleep,
            "vllm_importance_sampling_correction": False,
        }  # fmt: skip
    settings = trl.GRPOConfig(
        output_dir=str(folder / "out"), max_steps=arguments.steps, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=count // _RANKS // micro_batch, num_generations=work.group_size,
        max_completion_length=work.outputs, temperature=1.0, generation_kwargs=generation, learning_rate=1e-6,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, bf16=cuda, use_cpu=not cuda,
        gradient_checkpointing=arguments.checkpoint, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        model_init_kwargs={"dtype": arguments.dtype, "attn_implementation": "sdpa"}, **chosen,
    )  # fmt: skip
    clock = Clock(device)
    spans, begun, ends = Spans(clock=clock), time.perf_counter(), list[float]()

    def mark(*_: Any, **__: Any) -> None:
        clock.finish()
        ends.append(time.perf_counter())

    def write(_: Any, state: Any, __: Any, logs: dict[str, Any], **___: Any) -> None:
        """A line of a step once its figures are known."""
        if "reward" not in logs:
            return
        whole_s, generated = ends[-1] - ends[-2], round(logs["completions/mean_length"] * count)
        row = {
            "what": "step", "model": arguments.model, "step": state.global_step, "groups": work.groups, "group_size": work.group_size,
            "inputs": work.inputs, "outputs": work.outputs, "dtype": arguments.dtype, "micro_batch": micro_batch, "ranks": _RANKS,
            "checkpoint": arguments.checkpoint, "compile": arguments.compile, "sleep": arguments.sleep,
            "startup_s": round(ends[0] - begun, 1), "whole_s": round(whole_s, 3),
            "timeline_s": {name: round(seconds, 3) for name, seconds in spans.seconds.items()},
            "tokens_per_s": round(generated / whole_s), "generated": generated, "peak_gib": round(clock.peak() / 2**30, 2),
            "device_gib": round(clock.used() / 2**30, 2), "reward": round(logs["reward"], 4), "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
        }  # fmt: skip
        spans.seconds.clear()
        if _RANK == 0:
            print(json.dumps(row), flush=True)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [even_share(text) for text in completions]

    steps = transformers.TrainerCallback()
    steps.on_train_begin, steps.on_step_end, steps.on_log = mark, mark, write
    trainer = trl.GRPOTrainer(
        model=str(folder), reward_funcs=reward, args=settings, train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        callbacks=[steps],
    )  # fmt: skip
    if cuda:
        engine = trainer.vllm_generation
        engine.generate = spans.timed("generate", engine.generate)
        engine.sync_weights = spans.timed("sync_weights", engine.sync_weights)
    if arguments.compile:
        for layer in trainer.model.model.layers:
            layer.compile()
    clock.peak()
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", choices=sorted(MODELS))
    parser.add_argument("--size", default="full", choices=sorted(SIZES))
    for name, of in (("groups", "prompts"), ("group-size", "answers a prompt"), ("outputs", "tokens of an answer")):
        parser.add_argument(f"--{name}", type=int, help=of)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and state of the optimizer")
    parser.add_argument("--micro-batch", type=int, help="answers of a rank at a time (default: 8, or 4 on a GPU of less than 100 GiB)")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in its backward pass")
    parser.add_argument("--compile", action="store_true", help="compile each layer of the trainer")
    parser.add_argument("--sleep", action="store_true", help="vLLM gives its memory up while the trainer works")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="for the model; needed by several ranks")
    arguments = parser.parse_args()
    work, device = SIZES[arguments.size], torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    changed = {name: value for name in ("groups", "group_size", "outputs") if (value := getattr(arguments, name)) is not None}
    work = dataclasses.replace(work, **changed)
    if work.groups * work.group_size % _RANKS:
        parser.error(f"--groups {work.groups}: their answers must divide over {_RANKS} ranks")
    if _RANKS > 1 and arguments.folder is None:
        parser.error(f"--folder: {_RANKS} ranks read one; name it")
    with TemporaryDirectory() as scratch:
        folder: Path = arguments.folder or Path(scratch)
        ready = folder / "ready"
        if _RANK == 0 and not ready.exists():
            write_model(MODELS[arguments.model], folder, device, work.inputs + work.outputs)
            if device.type == "cuda":
                # For vLLM, which takes what is free.
                torch.cuda.empty_cache()
            ready.touch()
        while not ready.exists():
            time.sleep(0.1)
        run_steps(arguments, work, device, folder)


if __name__ == "__main__":
    main()
