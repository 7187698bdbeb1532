# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The page for users of Megatron-LM, against the code."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_tools.recipes import RunConfig
from mcore_tools.recipes._values import dataclass_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-megatron.md"
WHEELS = ("mcore_ckpt", "mcore_inference", "mcore_moe", "mcore_parallel", "mcore_rl", "megatron_fsdp")
NAMES = """
HyperCommGrid BridgeCommunicator ColumnParallelLinear RowParallelLinear VocabParallelEmbedding vocab_parallel_cross_entropy
DistributedDataParallel DistributedDataParallelConfig OptimizerConfig TransformerConfig TransformerLayer GPTModel BertModel MambaModel
GraphableMegatronModule is_layer_window_attention get_sliding_window_causal_mask SoftmaxOne YarnRotaryEmbedding quick_gelu quick_geglu
weighted_quick_geglu IndexedDataset IndexedDatasetBuilder GPTDataset GPTDatasetConfig GPTFIMDataset BlendedDataset
BlendedMegatronDatasetConfig BlendedMegatronDatasetBuilder Timers relative_grad_diff expected_rel_bound check_gradient internal_api
experimental_api deprecated TopKRouter MoELayer MoEAllGatherTokenDispatcher MoEAlltoAllTokenDispatcher MoEFlexTokenDispatcher GroupedMLP
SequentialMLP TEGroupedMLP get_fp4_align_size fully_shard fully_shard_model fully_shard_optimizer
MegatronFSDP MixedPrecisionPolicy save load ShardedTensor AsyncRequest CheckpointingException DynamicInferenceEngine
DynamicInferenceContext DynamicInferenceRequest DynamicInferenceRequestRecord StaticInferenceEngine SamplingParams
InferenceBatchDimensions CUDAGraphBatchDimensionBuilder MambaInferenceStateConfig get_mamba_inference_state_config_from_model
ContextOverflowError DataParallelInferenceCoordinator InferenceClient get_asyncio_loop create_unified_mempool prefetch_managed_tensor
advise_managed_tensor_preferred_location RolloutGenerator TokenizedRolloutGenerator GroupedRolloutGenerator ContrastiveRolloutGenerator
EvaluationAgent RewardOnlyAgent WeightedMultiTask InferenceInterface ChatInferenceInterface MegatronLocal MegatronChatLocal
calculate_grpo_loss PackingContext
"""
"""Names of Megatron that users know."""


WITHOUT_OBJECT = """
UnknownHeaderError EngineSuspendedError trace_async_exceptions _run_coroutine_sync start_listening_to_data_parallel_coordinator
run_engine_with_coordinator TextGenerationController GPTInferenceWrapper StaticInferenceContext Scheduler MCoreEngine CommonInferenceParams
AsyncStream get_metadata_types return_segments
step_modern step_legacy symmetric_ar_type MegatronLLM MegatronAsyncLLM ServeConfig Headers SET_EPOCH
--inference-max-requests --inference-max-seq-length --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb
--inference-dynamic-batching-num-cuda-graphs --decode-only-cuda-graphs --cuda-graph-impl --disable-chunked-prefill
--use-flashinfer-fused-rope --inference-coordinator-port --inference-wandb-logging-step-interval --batch-invariant-mode
--materialize-only-last-token-logits
"""
"""Names and flags of its inference for which something else stands here."""


def rows() -> Iterator[list[str]]:
    for line in PAGE.read_text(encoding="ascii").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 3:
            yield cells


def names() -> dict[str, str]:
    """What each row of a name says is here."""
    return {
        cells[0].strip("`"): cells[1] for cells in rows() if cells[1] == "not there yet" or re.fullmatch(r"`m[a-z_]+\.[^`]*`", cells[1])
    }


def public() -> dict[str, Any]:
    """Everything public in the wheels, by its own name; a name with several objects keeps any."""
    objects: dict[str, Any] = {}
    for wheel in WHEELS:
        root = importlib.import_module(wheel)
        rooms = [name for _, name, is_room in pkgutil.iter_modules(root.__path__, f"{wheel}.") if is_room]
        for room in [wheel, *(name for name in rooms if not name.rpartition(".")[2].startswith("_"))]:
            module = importlib.import_module(room)
            objects |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return objects


def test_every_name_that_users_know_has_a_row() -> None:
    assert sorted(set(NAMES.split()) - set(names())) == []


def test_what_stands_for_a_name_that_is_no_object_has_a_row() -> None:
    named = {name for cells in rows() for name in re.findall(r"`([^`]+)`", cells[0])}
    assert {*WITHOUT_OBJECT.split(), "PUT /api"} - named == set()


def test_what_is_not_there_yet_is_not_there() -> None:
    arrived = [name for name, here in names().items() if here == "not there yet" and name in public()]
    assert arrived == [], "write their calls and differences into docs/from-megatron.md"


@pytest.mark.parametrize(("name", "here"), [(name, here.strip("`")) for name, here in names().items() if here != "not there yet"])
def test_calls_are_as_written(name: str, here: str) -> None:
    path, _, arguments = here.partition("(")
    module, _, attribute = path.rpartition(".")
    assert attribute == name and attribute in importlib.import_module(module).__all__
    if not arguments:
        return
    parameters = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
    wanted = arguments.rstrip(")").split(", ")
    keywords = wanted[wanted.index("*") + 1 :] if "*" in wanted else []
    positional = [argument for argument in wanted if argument not in ("*", *keywords)]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    kinds = {stars.get(one.kind, "") + one.name: one.kind for one in parameters.values()}
    by_place = [argument for argument, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == by_place[: len(positional)]
    assert [argument for argument in keywords if kinds.get(argument) is not inspect.Parameter.KEYWORD_ONLY] == []


def test_fields_exist() -> None:
    objects, checked, problems = public(), 0, []
    for cells in rows():
        if "`" not in cells[1] or cells[0].strip("`") in names():
            continue
        owner = ""
        for text in re.findall(r"`([^`]+)`", cells[1]):
            if call := re.fullmatch(r"(\w+)\((\w+)=.*\)", text):
                right = call[1] in objects and call[2] in inspect.signature(objects[call[1]]).parameters
            elif field := re.fullmatch(r"(\w*)\.(\w+)", text):
                owner = field[1] or owner
                kind = objects.get(owner)
                right = dataclasses.is_dataclass(kind) and field[2] in {one.name for one in dataclasses.fields(kind)}
            else:
                right = text in objects
            checked += 1
            problems += [] if right else [f"{text} of {cells[0]}"]
    assert problems == []
    assert checked > 150


def test_fields_of_a_run_exist() -> None:
    paths = re.findall(r"`((?:rl|train)\.(?!jsonl)[a-z_.]+)`", PAGE.read_text(encoding="ascii"))
    assert len(paths) > 25
    for path in paths:
        kind: Any = RunConfig
        for name in path.split("."):
            assert name in {one.name for one in dataclasses.fields(kind)}, path
            kind = dataclass_of(typing.get_type_hints(kind)[name])
