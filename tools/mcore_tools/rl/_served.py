# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of a run that are servers elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_parallel import Group
from mcore_parallel.data import Tokenizer
from mcore_rl import InferenceInterface, ServedWeights
from mcore_rl.inference import BalancedInference, OpenAIInference, RequestSeeds, SGLangInference, WeightServer
from mcore_tools.recipes import RunConfig, ServedConfig
from mcore_tools.rl._attempts import evaluation_seed

SERVED = "served"
"""Folder of a run with the weights that its servers have."""


def served_engines(
    config: RunConfig, served: ServedConfig, tokenizer: Tokenizer, model: Mapping[str, Any], world: Group, seed: int
) -> tuple[InferenceInterface, InferenceInterface, ServedWeights]:
    """What draws answers to learn from, what draws those of evaluations, and what takes the weights.

    Args:
        config: the run.
        served: its servers.
        tokenizer: the policy's.
        model: family, sizes and entries, as of ``describe_model``.
        world: ranks that share the servers.
        seed: of what this rank draws to learn from, by servers of this project; evaluations have another one.

    Raises:
        ValueError: no family of Hugging Face expresses the model; a token file that cannot be read.
    """
    if "family" not in model:
        raise ValueError("rl.served sends weights by their Hugging Face names, and no family expresses this model; set rl.served=none")
    key = _key(served, "api_key_file")
    weights_key = _key(served, "weights_key_file") or key
    shared: dict[str, Any] = {"tokenizer": tokenizer, "timeout_s": served.timeout_s, "api_key": key}
    shared |= {"max_concurrency": served.max_concurrency}

    def interface(logprobs: str, seed: int) -> InferenceInterface:
        if served.kind == "sglang":
            return BalancedInference([SGLangInference(url, logprobs=logprobs, **shared) for url in served.urls])  # type: ignore[arg-type]
        own: dict[str, Any] = {"model": served.model, "logprobs": logprobs, **shared}
        # Each answer has the same seed, whichever server draws it.
        own["seeds"] = RequestSeeds(seed) if served.kind == "mcore" else None
        return BalancedInference([OpenAIInference(url, **own) for url in served.urls])

    form: dict[str, Any] = {"family": model["family"], "config": model["config"], "hf_config": model["hf_config"]}
    servers = [WeightServer(url=url, kind=served.kind, api_key=weights_key, timeout_s=served.timeout_s) for url in served.urls]  # type: ignore[arg-type]
    folder = Path(served.folder or Path(config.output) / SERVED)
    sink = ServedWeights(servers, folder, **form, in_flight=served.in_flight, group=world)  # type: ignore[arg-type]
    # Nobody learns from the answers of an evaluation: their log-probabilities may be of any kind, and the likeliest ones are asked for.
    return interface(served.logprobs, seed), interface("processed", evaluation_seed(seed)), sink


def _key(served: ServedConfig, field: str) -> str | None:
    """What the file of a field holds; None where the field is empty."""
    name: str = getattr(served, field)
    if not name:
        return None
    try:
        return Path(name).read_text().strip()
    except OSError as error:
        raise ValueError(f"rl.served.{field}={name!r} cannot be read: {error.strerror}; name a file that holds the key") from error
