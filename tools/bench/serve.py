# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine's throughput and latency on random weights, beside a peer.

python -m tools.bench.serve --model llama-1b --output docs/benchmarks/serve.json \\
    --peer "vllm=python3 serve_vllm.py --model {model}"

Every case is prompts of random tokens at temperature 1 to a fixed number of new tokens: requests x (input / output). Each runs twice, the
second counts; "graph_share" is the part of its steps that replayed a CUDA graph. A peer is a command that prints one JSON line a case
with "n", "isl", "osl" and "out_tok_s".

With --batch-invariant an engine with a batch-invariant backend runs the same cases after the plain one; its "cost" is the time of a token
beside that one's.

With --loras 1 4 8 engines with as many slots of --lora-rank run them too, requests over all adapters in turn; "cost" as above.

python -m tools.bench.serve --model llama-1b --rate 8 16 32 --requests 512 --lengths 512 256 --output docs/benchmarks/serve_online.json \\
    --server "vllm=vllm serve folder/of/{model} --load-format dummy --port {port}"

With --rate servers are measured instead, ours and each --server, an OpenAI-compatible one: requests arrive as a Poisson process, the same
ones at the same times for each server, and the time to the first token and the gaps between tokens count. --rate inf sends all at once.

python -m tools.bench.serve --model qwen3-8b --rate inf --requests 512 --lengths 512 256 --data-parallel 2 \\
    --output docs/benchmarks/serve_replicas.json

With --data-parallel N too, an engine without a server is measured, its server, then one engine and N engines behind a coordinator, started
as by `mcore serve --data-parallel N`, one a GPU; each engine gets --requests at --rate.
"""

import argparse
import itertools
import json
import random
import resource
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    LoraSlots,
    LoraWeights,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.text import Tokenizer
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, TransformerConfig, dense_feed_forward, hybrid_config
from mcore_parallel.nn import MambaConfig
from mcore_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tools.bench._load import PoissonLoad
from tools.bench._online import OURS, online_rows, replica_rows, with_online_ratios
from tools.bench._record import record

_LLAMA: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu"}
MODELS: Mapping[str, TransformerConfig] = MappingProxyType(
    {
        "tiny": TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=512),
        "tiny-mixture": TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=512),
        "llama-1b": TransformerConfig(
            num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8, vocab_size=128256,
            rotary_base=500000, share_embeddings_and_output_weights=True, **_LLAMA,
        ),
        "qwen3-8b": TransformerConfig(
            num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, num_query_groups=8, kv_channels=128,
            vocab_size=151936, rotary_base=1000000, qk_layernorm=True, norm_epsilon=1e-6, **_LLAMA,
        ),
        "qwen3-30b-a3b-l12": TransformerConfig(
            num_layers=12, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32, num_query_groups=4, kv_channels=128,
            vocab_size=151936, rotary_base=1000000, qk_layernorm=True, norm_epsilon=1e-6, **_LLAMA,
        ),
        "hybrid-1b": hybrid_config(
            "M-M-M-M*-M-M-M-M*-M-M-M-M*-", hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8,
            vocab_size=128256, activation="squared_relu", position_embedding_type="none", share_embeddings_and_output_weights=True,
            mamba=MambaConfig(state_dim=128, head_dim=64, num_groups=8),
        ),
    }
)  # fmt: skip
EXPERTS: Mapping[str, MoEConfig] = MappingProxyType(
    {
        "tiny-mixture": MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32),
        "qwen3-30b-a3b-l12": MoEConfig(num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768),
    }
)
CASES = {"throughput": (512, 512, 256), "one": (1, 128, 256), "few": (32, 128, 256), "long": (64, 2048, 128), "quick": (4, 16, 8)}


def build(
    model: str,
    device: str | None,
    memory_gb: float,
    kv_cache_dtype: Literal["fp8"] | None = None,
    weight_dtype: Literal["fp8", "fp8_weight_only"] | None = None,
    groups: ProcessGroups | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    batch_invariant: bool = False,
    execution: ExecutionConfig | None = None,
    num_loras: int = 0,
    lora_rank: int = 16,
) -> tuple[DynamicInferenceEngine, float]:
    """An engine over random weights, with so many random adapters, and the seconds until its first token."""
    begun = time.perf_counter()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config, dtype = MODELS[model], torch.bfloat16 if device == "cuda" else torch.float32
    # Drawn on the device: the values do not matter, the time does.
    torch.manual_seed(0)
    feed_forward = moe_feed_forward(EXPERTS[model]) if model in EXPERTS else dense_feed_forward
    net = GPTModel(
        config,
        groups or ProcessGroups.single(),
        feed_forward=feed_forward,
        attention_core=PagedAttention(),
        backend=choose_backend(batch_invariant=batch_invariant),
        device=device,
        dtype=dtype,
        seed=None,
    ).eval()
    for parameter in net.parameters():
        # Norms keep their ones: beside small ones the layers would add nothing that an error in fp8 shows in.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    sizes = InferenceConfig(
        max_sequence_length=4096,
        max_requests=512,
        max_tokens=8192,
        block_size_tokens=64,
        buffer_size_gb=memory_gb,
        kv_cache_dtype=kv_cache_dtype,
        weight_dtype=weight_dtype,
        lora=slots_of(model, num_loras, lora_rank) if num_loras else None,
    )
    engine = DynamicInferenceEngine(net, DynamicInferenceContext.for_model(net, sizes), tokenizer, execution=execution)
    for number in range(num_loras):
        engine.load_lora(f"adapter-{number}", random_adapter(engine))
    engine.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=2))
    return engine, time.perf_counter() - begun


def slots_of(model: str, num_loras: int, rank: int) -> LoraSlots:
    """Beside all linear layers without experts."""
    targets = ("qkv", "out") if model in EXPERTS else ("qkv", "out", "up", "down")
    return LoraSlots(max_loras=num_loras, max_lora_rank=rank, targets=targets)


def random_adapter(engine: DynamicInferenceEngine) -> LoraWeights:
    """Of all layers with slots."""
    slots, matrices = engine.context.config.lora, {}
    assert slots is not None and slots.targets is not None
    for name, layer in engine.model.named_modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and name.rpartition(".")[2] in slots.targets:
            *out, width = layer.weight_spec.shape
            place: Any = {"device": layer.weight.device, "dtype": engine.model.dtype}
            matrices[name] = 0.02 * torch.randn(slots.max_lora_rank, width, **place), 0.02 * torch.randn(*out, slots.max_lora_rank, **place)
    return LoraWeights(rank=slots.max_lora_rank, alpha=2.0 * slots.max_lora_rank, matrices=matrices)


def run_case(engine: DynamicInferenceEngine, requests: int, inputs: int, outputs: int) -> dict[str, Any]:
    # Other prompts in each run: none finds its beginning in the cache.
    rng = random.Random(engine.step_count)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(inputs)] for _ in range(requests)]
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=outputs, ignore_eos=True)
    steps, recorded, begun = engine.step_count, engine.stats()["graph_steps"], time.perf_counter()
    loras = engine.loras or (None,)
    records = engine.generate(prompts, params, lora=[loras[number % len(loras)] for number in range(requests)])
    seconds = time.perf_counter() - begun
    made = sum(record.num_generated for record in records)
    if made != requests * outputs:
        raise RuntimeError(f"{made} tokens of {requests * outputs} came: {next(record.error for record in records if record.error)}")
    steps, recorded = engine.step_count - steps, engine.stats()["graph_steps"] - recorded
    return {
        "n": requests, "isl": inputs, "osl": outputs, "s": round(seconds, 3), "out_tok_s": round(made / seconds),
        "ms_per_tok": round(seconds / outputs * 1e3, 3), "steps": steps, "graph_share": round(recorded / max(1, steps), 3),
    }  # fmt: skip


def log_prob_error(engine: DynamicInferenceEngine, model: str, device: str) -> float:
    """Mean distance of prompts' log-probabilities from those of the same weights and a cache in the model's dtype."""
    rng, scored = random.Random(1), SamplingParams(num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(256)] for _ in range(8)]
    wide, _ = build(model, device, 2.0)
    values = [
        torch.tensor([number for record in each.generate(prompts, scored) for number in record.prompt_log_probs or []])
        for each in (engine, wide)
    ]
    return float((values[0] - values[1]).abs().mean())


def profile(engine: DynamicInferenceEngine, requests: int, inputs: int) -> list[dict[str, Any]]:
    """Where 20 decode steps go: kernels by time."""
    rng, numbers = random.Random(0), []
    for _ in range(requests):
        prompt = [rng.randrange(engine.vocab_size) for _ in range(inputs)]
        numbers.append(engine.add_request(prompt, SamplingParams(num_tokens_to_generate=60, ignore_eos=True)))
    while any(not engine.get_request(number).num_generated for number in numbers):
        engine.step()
    with torch.profiler.profile() as trace:
        begun = time.perf_counter()
        for _ in range(20):
            engine.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    rows = [
        {"name": event.key[:90], "ms": round(event.self_device_time_total / 20e3, 4), "calls": event.count / 20}
        for event in trace.key_averages()
        if event.self_device_time_total > 0 and event.self_cpu_time_total == 0
    ]
    rows.sort(key=lambda row: -row["ms"])
    for number in numbers:
        engine.abort(number)
    return [{"name": "a step on the host's clock", "ms": round(seconds / 20 * 1e3, 3), "calls": 1}, *rows[:25]]


def peer_rows(name: str, command: str, model: str, timeout_s: float) -> list[dict[str, Any]]:
    """The last line of each case that the peer printed."""
    done = subprocess.run(
        shlex.split(command.format(model=model)), capture_output=True, text=True, timeout=timeout_s, check=False
    )  # fmt: skip
    rows = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row["n"], row["isl"], row["osl"]] = {"by": name, "model": model, **row}
    return list(rows.values()) or [{"by": name, "model": model, "error": (done.stderr or done.stdout)[-600:]}]


def with_cost(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a batch-invariant engine, or of one with adapters, with its time a token beside that of the plain one."""
    same = ("model", "n", "isl", "osl")
    plain = next(other for other in rows if other["by"] == "mcore" and all(other[name] == row[name] for name in same))
    return {**row, "cost": round(row["s"] / plain["s"], 3)}


def measure_online(options: argparse.Namespace) -> None:
    """Servers of the models under each rate, one server at a time."""
    # A connection a request, of servers and clients, which inherit the limit.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ours = f"{OURS} --device {options.device} --memory-gb {options.memory_gb} --api-server-count {options.api_server_count}"
    # As `mcore serve` does, where there is a GPU.
    behind = " --data-parallel 1" if options.device == "cuda" or options.api_server_count > 1 else ""
    servers = [("mcore", ours + behind), *((name, command) for name, _, command in (text.partition("=") for text in options.server))]
    rows: list[dict[str, Any]] = []
    for model in options.model:
        shape = {"num_requests": options.requests, "inputs": options.lengths[0], "outputs": options.lengths[1]}
        loads = [PoissonLoad(rate=rate, vocab_size=MODELS[model].vocab_size, **shape) for rate in options.rate]
        if options.data_parallel is not None:
            rows += replica_rows(ours, model, loads, options.timeout_s, options.data_parallel)
        else:
            rows += with_online_ratios(online_rows(servers, model, loads, options.timeout_s))
    for row in rows:
        if any(name.endswith("_ratio") for name in row) or options.data_parallel is not None:
            print(json.dumps(row), flush=True)
    if options.output is not None:
        record(options.output, {"work": "servers of random weights, prompts that arrive as a Poisson process, temperature 1", "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-1b"], choices=sorted(MODELS))
    parser.add_argument("--cases", nargs="+", default=["throughput", "one", "few", "long"], choices=sorted(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-gb", type=float, default=30.0, help="of the key-value cache")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="with {model} to be filled in")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of a peer; of a server's start and of each of its requests")
    parser.add_argument("--profile", type=int, nargs="*", default=[], metavar="REQUESTS", help="print where decode steps of so many go")
    parser.add_argument("--kv-cache-dtype", choices=("fp8",), help="of keys and values; None for the model's")
    parser.add_argument("--weight-dtype", choices=("fp8", "fp8_weight_only"), help="of linear layers and experts; None for the model's")
    parser.add_argument("--batch-invariant", action="store_true", help="measure a batch-invariant engine too, after the plain one")
    parser.add_argument(
        "--loras", type=int, nargs="+", default=[], metavar="N", help="measure engines with N adapters too, after the plain one"
    )
    parser.add_argument("--lora-rank", type=int, default=16, metavar="R", help="of these adapters (default: 16)")
    parser.add_argument("--rate", type=float, nargs="+", help="measure servers under so many requests/s instead; inf for all at once")
    parser.add_argument("--data-parallel", type=int, metavar="N", help="of --rate: measure one engine, and one and N behind a coordinator")
    parser.add_argument("--api-server-count", type=int, default=1, metavar="N", help="of --rate: processes of our server that answer HTTP")
    parser.add_argument("--requests", type=int, default=256, help="of each rate")
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(512, 256), metavar=("IN", "OUT"), help="mean tokens of prompts and outputs"
    )
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="with {model} and {port} to be filled in")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.data_parallel is not None and (not arguments.rate or arguments.server or arguments.data_parallel < 1):
        parser.error(f"--data-parallel {arguments.data_parallel} measures our own servers; give --rate, no --server, and an N from 1")
    if arguments.rate:
        measure_online(arguments)
        return
    rows = []
    # Peers first, of all models: they ask for most of the memory of the device, and this process gives not all of its back.
    for model, text in itertools.product(arguments.model, arguments.peer):
        name, _, command = text.partition("=")
        for row in peer_rows(name, command, model, arguments.timeout_s):
            rows.append(row)
            print(json.dumps(row), flush=True)
    # Batch-invariant or not, and adapters.
    kinds = [(False, 0), *([(True, 0)] if arguments.batch_invariant else []), *((False, count) for count in arguments.loras)]
    for model, (exact, num_loras) in itertools.product(arguments.model, kinds):
        engine, startup_s = build(
            model,
            arguments.device,
            arguments.memory_gb,
            arguments.kv_cache_dtype,
            weight_dtype=arguments.weight_dtype,
            batch_invariant=exact,
            num_loras=num_loras,
            lora_rank=arguments.lora_rank,
        )
        chosen = {"kv": arguments.kv_cache_dtype, "weights": arguments.weight_dtype}
        error: dict[str, Any] = {name: dtype for name, dtype in chosen.items() if dtype is not None}
        if error and not num_loras:
            error["log_prob_error"] = float(f"{log_prob_error(engine, model, arguments.device):.3g}")
        by = "mcore, batch-invariant" if exact else f"mcore, {num_loras} adapters of rank {arguments.lora_rank}" if num_loras else "mcore"
        print(json.dumps({"model": model, "by": by, "startup_s": round(startup_s, 1)}), flush=True)
        for case in arguments.cases:
            run_case(engine, *CASES[case])
            row = {"by": by, "model": model, **run_case(engine, *CASES[case]), "startup_s": round(startup_s, 1), **error}
            rows.append(row if by == "mcore" else with_cost(row, rows))
            print(json.dumps(rows[-1]), flush=True)
        for requests in arguments.profile:
            for row in profile(engine, requests, 128):
                print(json.dumps({"profile": requests, "by": by, **row}), flush=True)
        del engine
        torch.cuda.empty_cache()
    speeds = {(row["model"], row["n"], row["isl"]): row["out_tok_s"] for row in rows if row["by"] == "mcore"}
    for row in rows:
        if not row["by"].startswith("mcore") and "out_tok_s" in row and (key := (row["model"], row["n"], row["isl"])) in speeds:
            row["mcore_ratio"] = round(speeds[key] / row["out_tok_s"], 3)
    if arguments.output is not None:
        record(arguments.output, {"work": "serving random prompts, random weights, temperature 1", "rows": rows})


if __name__ == "__main__":
    main()
