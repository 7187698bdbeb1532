# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A vLLM server answers with the log-probabilities of the policy, and of new weights when it was given them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_ckpt.hf import export_hf, import_hf
from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_inference.server import WeightFolders, serve
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import (
    BatchStyle,
    GenericGenerationArgs,
    InferenceRequest,
    InferenceResponse,
    ServedWeights,
    TokenRollout,
    refit,
    rollout_batches,
)
from mcore_rl._reference import token_logprobs
from mcore_rl.inference import OpenAIInference, WeightServer

SIZES: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 1024, "vocab_size": 256,
}  # fmt: skip
SMALL = {**SIZES, "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256}
PROMPTS = [[65 + (7 * row + i) % 26 for i in range(12)] for row in range(8)]
START_S = 300.0


class Bytes:
    """A tokenizer whose ids are bytes; nothing ends a text."""

    vocab_size = 256
    eod = None

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("latin-1"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")


def policy(seed: int, device: str, dtype: torch.dtype, sizes: dict[str, Any] = SIZES, **options: Any) -> GPTModel:
    model = GPTModel(TransformerConfig(**sizes), ProcessGroups.single(), device=device, dtype=dtype, seed=seed, **options)
    with torch.no_grad():
        # Distributions far from uniform, and from those of another seed.
        model.get_parameter("output.weight").mul_(6.0)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges, whose ids are the bytes."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in plain else next(others)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bpe = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "ignore_merges": False}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": bpe}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def ask(interface: OpenAIInference) -> list[InferenceResponse]:
    args = GenericGenerationArgs(temperature=1.0, max_tokens=24)
    return [row[0] for row in asyncio.run(interface.agenerate(InferenceRequest(prompts=PROMPTS, generation_args=args)))]


def mean_gap(model: GPTModel, answers: Sequence[InferenceResponse]) -> float:
    """Mean distance of the server's log-probabilities from those of a model."""
    rollouts = [
        TokenRollout(
            trajectory=answer.token_ids, reward=0.0, logprobs=answer.logprobs, env_id="bytes", problem_id=str(number),
            generation_mask=[i >= answer.prompt_length for i in range(len(answer.token_ids))],
        )
        for number, answer in enumerate(answers)
    ]  # fmt: skip
    style = BatchStyle(device=next(model.parameters()).device)
    [batch] = rollout_batches(rollouts, [0.0] * len(rollouts), seq_len=64, micro_batch_size=len(rollouts), style=style)
    [own] = token_logprobs(model, [batch], ProcessGroups.single())
    counted = batch.loss_mask != 0
    gaps: Tensor = (own - batch.extras["inference_logprobs"])[counted].abs()
    assert len(gaps) == sum(len(answer.logprobs) for answer in answers)
    return gaps.mean().item()


def check_server(interface: OpenAIInference, sink: ServedWeights, old: GPTModel, new: GPTModel, tolerance: float) -> None:
    """The server, which has the old weights, takes the new ones, and then the old ones again."""
    for version, (model, other) in enumerate([(old, new), (new, old), (old, new)]):
        if version:
            refit(model, ProcessGroups.single(), sink)
        answers = ask(interface)
        assert mean_gap(model, answers) < tolerance and mean_gap(other, answers) > 0.5
    assert set(sink.versions.values()) == {2}


def sink_of(server: WeightServer, folder: Path, dtype: torch.dtype | None = None, sizes: dict[str, Any] = SIZES) -> ServedWeights:
    return ServedWeights([server], folder, family="llama", config=sizes, dtype=dtype, in_flight="drain")


@pytest.mark.journey
def test_the_check_holds_for_a_server_of_this_project(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    root.mkdir()
    context = DynamicInferenceContext(TransformerConfig(**SMALL), InferenceConfig(max_sequence_length=64, max_requests=8))
    served = policy(0, "cpu", torch.float32, SMALL, attention_core=PagedAttention())
    engine = DynamicInferenceEngine(served, context, Bytes())
    with serve(engine, token="secret", weights=WeightFolders(root=root, read=lambda folder: import_hf(folder).tensors)) as running:
        interface = OpenAIInference(running.url, model="mcore", tokenizer=Bytes(), logprobs="processed", api_key="secret")
        sink = sink_of(WeightServer(url=running.url, kind="mcore", api_key="secret"), root, sizes=SMALL)
        old, new = (policy(seed, "cpu", torch.float32, SMALL) for seed in (0, 1))
        check_server(interface, sink, old, new, 1e-4)


def python_with_vllm() -> str:
    """An interpreter that finds vLLM; the test is skipped where none does."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    for python in (sys.executable, "python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", find], check=False).returncode == 0:
                return python
    pytest.skip("vllm is not installed: neither for this Python nor for python3")


@contextlib.contextmanager
def vllm_server(python: str, folder: Path, log: Path) -> Iterator[str]:
    """A server of a folder, at the address that is yielded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "policy", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "64", "--gpu-memory-utilization", "0.3", "--enforce-eager",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    ]  # fmt: skip
    # The routes that take weights are there for developers.
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(url, process, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Its engine is a process of its own, in the same session.
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            if reply.status == 200:
                return
        time.sleep(1)
    raise AssertionError(f"the server is not there within {START_S:g} s:\n{log.read_text()[-3000:]}")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_answers_with_the_weights_that_it_was_given_last(tmp_path: Path) -> None:
    python = python_with_vllm()
    old, new = (policy(seed, "cuda", torch.bfloat16) for seed in (0, 1))
    folder = tmp_path / "first"
    weights = ((name, value.detach()) for name, value in old.named_parameters())
    export_hf(weights, folder, family="llama", config=SIZES, hf_config={"max_position_embeddings": 64})
    write_tokenizer(folder)
    with vllm_server(python, folder, tmp_path / "vllm.log") as url:
        interface = OpenAIInference(url, model="policy", tokenizer=Bytes(), logprobs="processed", timeout_s=120.0)
        server = WeightServer(url=url, kind="vllm", timeout_s=120.0)
        # Kernels differ: the mean of each token's rounding.
        check_server(interface, sink_of(server, tmp_path / "weights", torch.bfloat16), old, new, 0.05)
