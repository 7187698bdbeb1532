# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Libraries that attend over the paged cache, by stand-ins that compute their documented calls in torch; and what they are refused."""

import dataclasses
import importlib.machinery
import itertools
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_inference._capability import graph_obstacle, head_rotation
from mcore_inference.attention import PageFormat, TableRows, _backends, load_rotation
from mcore_inference.cache import PagedKVCache
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import AttentionSpec, LatentAttentionConfig, PackedHeads, Step, apply_rotary, reference_attention

LIBRARIES = ("flash_attn_3", "flashinfer")
ADAPTERS = {"flash_attn_3": "mcore_inference.attention._flash_attn_3", "flashinfer": "mcore_inference.attention._flashinfer"}


def attend_row(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> Tensor:
    """[n, A, d] over [m, K, d]: causal, the last query beside the last key; zeros for a row without keys."""
    group, behind = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = (x.repeat_interleave(group, dim=1).double() for x in (k, v))
    distance = torch.arange(len(q))[:, None] + behind - torch.arange(len(k))[None, :]
    seen = (distance >= 0) & ((distance <= left) if left >= 0 else torch.ones_like(distance, dtype=torch.bool))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def is_table(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dtype == torch.int32 and tuple(x.shape) == shape and x.is_contiguous()


class FlashAttention:
    """``flash_attn_interface`` of FlashAttention 3."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        """Of each call, whether its rows are of several tokens."""

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, page_table: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None, rotary_seqlens: Any = None,
        q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
        scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0, return_softmax_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        assert k is v is qv is rotary_cos is cache_batch_idx is cache_leftpad is q_descale is k_descale is v_descale is None
        assert causal and softmax_scale is not None and not return_softmax_lse and window_size[1] == (0 if window_size[0] >= 0 else -1)
        pages, width = k_cache.shape[0], k_cache.shape[3]
        assert v_cache.shape == k_cache.shape and k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
        rows = len(cache_seqlens)
        assert is_table(cache_seqlens, (rows,)) and is_table(page_table, (rows, page_table.shape[1]))
        assert page_table.min() >= 0 and page_table.max() < pages
        if cu_seqlens_q is None:
            assert q.shape == (rows, 1, q.shape[2], width) and max_seqlen_q is None
            bounds = [(row, row + 1) for row in range(rows)]
        else:
            assert is_table(cu_seqlens_q, (rows + 1,)) and int(cu_seqlens_q[-1]) == len(q) and q.shape[2] == width
            bounds = list(itertools.pairwise(cu_seqlens_q.tolist()))
            assert isinstance(max_seqlen_q, int) and max_seqlen_q >= max(end - start for start, end in bounds)
        self.calls.append(cu_seqlens_q is not None)
        flat, out = q.reshape(-1, *q.shape[-2:]), torch.full_like(q, torch.nan)
        for row, (start, end) in enumerate(bounds):
            keys, values = (cache[page_table[row].long()].flatten(0, 1)[: cache_seqlens[row]] for cache in (k_cache, v_cache))
            out.view(flat.shape)[start:end] = attend_row(flat[start:end], keys, values, softmax_scale, window_size[0])
        return out


class FlashInferWrapper:
    """What both wrappers of flashinfer share: the rows that were planned."""

    plans = 0

    def __init__(self, workspace: Tensor, kv_layout: str, rows: Callable[[dict[str, Any]], Tensor]) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() == 128 * 2**20 and kv_layout == "NHD"
        self._rows, self._planned = rows, {}

    def _plan(self, indptr: Tensor, indices: Tensor, last: Tensor, **problem: Any) -> None:
        rows = len(last)
        # On the host: the library makes its plan there.
        assert all(x.device.type == "cpu" for x in (indptr, indices, last))
        assert is_table(indptr, (rows + 1,)) and is_table(indices, (int(indptr[-1]),)) and is_table(last, (rows,))
        assert int(last.min()) >= 1 and int(last.max()) <= problem["page_size"] and int(indices.min()) >= 0
        assert problem["q_data_type"] == problem["kv_data_type"]
        self._planned = {"indptr": indptr, "indices": indices, "last": last, **problem}
        type(self).plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        plan, bounds = self._planned, self._rows(self._planned).tolist()
        assert q.is_contiguous() and q.shape == (bounds[-1], plan["num_qo_heads"], plan["head_dim"]) and q.dtype == plan["q_data_type"]
        pages = paged_kv_cache[0].shape[0]
        for cache in paged_kv_cache:
            assert cache.shape == (pages, plan["page_size"], plan["num_kv_heads"], plan["head_dim"]) and cache.is_contiguous()
        out = torch.full_like(q, torch.nan)
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            blocks = plan["indices"][plan["indptr"][row] : plan["indptr"][row + 1]].long()
            length = (len(blocks) - 1) * plan["page_size"] + int(plan["last"][row])
            keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in paged_kv_cache)
            out[start:end] = attend_row(q[start:end], keys, values, plan["sm_scale"], plan["window_left"])
        return out


class BatchDecode(FlashInferWrapper):
    """``BatchDecodeWithPagedKVCacheWrapper``."""

    plans = 0

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, use_tensor_cores: bool = False
    ):
        super().__init__(float_workspace_buffer, kv_layout, lambda plan: torch.arange(len(plan["last"]) + 1))
        assert not use_cuda_graph
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: Any = "float16",
        kv_data_type: Any = None, data_type: Any = None, sm_scale: float | None = None, rope_scale: Any = None, rope_theta: Any = None,
    ) -> None:  # fmt: skip
        # Kernels without tensor cores are compiled for few sizes of groups.
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2)
        self._plan(
            indptr, indices, last_page_len, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
            window_left=window_left, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale,
        )  # fmt: skip


class BatchPrefill(FlashInferWrapper):
    """``BatchPrefillWithPagedKVCacheWrapper``."""

    plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False) -> None:
        super().__init__(float_workspace_buffer, kv_layout, lambda plan: plan["qo_indptr"])
        assert not use_cuda_graph

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None, custom_mask: Any = None,
        packed_custom_mask: Any = None, causal: bool = False, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: Any = None,
        rope_theta: Any = None, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert causal and is_table(qo_indptr, (len(paged_kv_last_page_len) + 1,))
        self._plan(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr=qo_indptr, num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim_qk, page_size=page_size, window_left=window_left, q_data_type=q_data_type,
            kv_data_type=kv_data_type, sm_scale=sm_scale,
        )  # fmt: skip


def turn_in_place(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:  # fmt: skip
    """``rope.apply_rope_with_cos_sin_cache_inplace``."""
    tokens = len(positions)
    assert positions.dtype == torch.int32 and cos_sin_cache.dtype == torch.float32 and is_neox
    assert query.is_contiguous() and key.is_contiguous() and query.shape[0] == key.shape[0] == tokens
    cos, sin = (part[:, None].to(query.dtype) for part in cos_sin_cache[positions.long()].chunk(2, dim=1))
    for x in (query, key):
        heads = x.view(tokens, -1, head_size)
        first, second = heads.clone().chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def stand_in(name: str, **parts: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in parts.items():
        setattr(module, key, value)
    return module


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashAttention]:
    """Both libraries are stand-ins, and run on a CPU in any dtype."""
    flash = FlashAttention()
    rope = stand_in("flashinfer.rope", apply_rope_with_cos_sin_cache_inplace=turn_in_place)
    inference = stand_in(
        "flashinfer", rope=rope, BatchDecodeWithPagedKVCacheWrapper=BatchDecode, BatchPrefillWithPagedKVCacheWrapper=BatchPrefill
    )
    inference.__path__ = []
    monkeypatch.setattr(BatchDecode, "plans", 0)
    monkeypatch.setattr(BatchPrefill, "plans", 0)
    interface = stand_in("flash_attn_interface", flash_attn_with_kvcache=flash.flash_attn_with_kvcache)
    for module in (interface, inference, rope):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_backends, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(_backends, "_HALF", (torch.float32, torch.float64))
    yield flash
    for adapter in ADAPTERS.values():
        sys.modules.pop(adapter, None)


def check_cuts(
    backend: str, heads: int, kv_heads: int, width: int, block_size: int, window: tuple[int, int] | None, dtype: torch.dtype, device: str
) -> list[int]:
    """Compare steps of any cut with the reference in float64; counts those with rows of one token, and of more."""
    rng = random.Random(block_size)
    torch.manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": heads * width, "num_attention_heads": heads, "num_query_groups": kv_heads}
    config = TransformerConfig(**shape, kv_channels=width, vocab_size=8)
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=100, block_size_tokens=block_size, max_requests=6, max_tokens=300)
    context = DynamicInferenceContext(config, sizes, dtype=dtype, device=device, attention_backend=backend)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, window=window, softmax_scale=0.3, dtype=dtype, device=device
    )
    core = PagedAttention(backend=backend).build_core(spec, ProcessGroups.single(), 0)
    lengths = [1, 17, 8, 9, 40, 3]
    q, k, v = ([torch.randn(n, count, width, device=device).to(dtype) for n in lengths] for count in (heads, kv_heads, kv_heads))
    wanted = [
        reference_attention(*(x.double() for x in parts), batch_size=1, window=spec.bounds, scale=0.3)
        for parts in zip(q, k, v, strict=True)
    ]
    got = [torch.empty_like(x) for x in q]
    rng.shuffle(context.allocator._free)
    for number in range(len(lengths)):
        context.add_request(number)
    done, steps = [0] * len(lengths), [0, 0]
    while done != lengths:
        left = [number for number in range(len(lengths)) if done[number] < lengths[number]]
        work = [(n, rng.choice([1, 1, 2, 7, 40])) for n in rng.sample(left, rng.randint(1, len(left)))]
        work = sorted(((n, min(count, lengths[n] - done[n])) for n, count in work), key=lambda item: item[1] > 1)
        for number, count in work:
            context.extend(number, count)
        inputs = context.build_step([(number, [0] * count) for number, count in work])
        rows = inputs.step.attention.rows
        assert isinstance(rows, TableRows) and rows.longest_query == max(count for _, count in work)
        steps[0], steps[1] = steps[0] + any(count == 1 for _, count in work), steps[1] + any(count > 1 for _, count in work)
        parts = [torch.cat([x[n][done[n] : done[n] + count] for n, count in work]) for x in (q, k, v)]
        for layer in range(2):
            out = core(*parts, layer, inputs.step)
        starts = itertools.accumulate((count for _, count in work[:-1]), initial=0)
        for (number, count), start in zip(work, starts, strict=True):
            got[number][done[number] : done[number] + count] = out[start : start + count]
            context.advance(number, count)
            done[number] += count
    close = 1e-12 if dtype == torch.float64 else 2e-2
    for number in range(len(lengths)):
        torch.testing.assert_close(got[number].double(), wanted[number], rtol=close, atol=close)
    return steps


@pytest.mark.parametrize("window", [None, (5, 0)])
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(6, 1, 1), (6, 6, 3), (4, 2, 8)])
@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_library_attends_as_the_reference_over_any_cut_into_steps(
    libraries: FlashAttention, backend: str, heads: int, kv_heads: int, block_size: int, window: tuple[int, int] | None
) -> None:
    steps = check_cuts(backend, heads, kv_heads, 4, block_size, window, torch.float64, "cpu")
    # The second layer of a step finds the plans of the first.
    if backend == "flashinfer":
        assert [BatchDecode.plans, BatchPrefill.plans] == steps
    else:
        assert True in libraries.calls


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, (5, 0)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("backend", LIBRARIES)
def test_the_library_itself_attends_as_the_reference(backend: str, width: int, window: tuple[int, int] | None) -> None:
    pytest.importorskip({"flash_attn_3": "flash_attn_interface"}.get(backend, backend))
    check_cuts(backend, 8, 2, width, 16, window, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LIBRARIES, "rotation"])
def test_an_engine_of_the_library_itself_has_the_log_probs_of_ours(name: str) -> None:
    pytest.importorskip({"flash_attn_3": "flash_attn_interface"}.get(name, "flashinfer"))
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=24, block_size_tokens=16, max_requests=4)
    ours, theirs = ({}, {}) if name == "rotation" else ({}, {"backend": name})
    prompts = [[1, 2, 3], list(range(30)), [5], [7] * 13, [9, 8]]
    params = SamplingParams(temperature=0, num_tokens_to_generate=12, return_log_probs=True)
    scored = dataclasses.replace(params, num_tokens_to_generate=1, skip_prompt_log_probs=False)

    def engine(turns: bool, **options: Any) -> DynamicInferenceEngine:
        model = small(**options, dtype=torch.bfloat16, device="cuda")
        config = dataclasses.replace(sizes, use_flashinfer_fused_rope=turns)
        # flashinfer plans each step on the host, which no recording can hold.
        execution = ALONE if options.get("backend") == "flashinfer" else ExecutionConfig()
        return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, config), execution=execution)

    records = engine(name == "rotation", **theirs).generate(prompts, params)
    whole = [[*prompt, *record.generated_tokens] for prompt, record in zip(prompts, records, strict=True)]
    # In bfloat16 steps of single tokens and whole prompts are up to 0.11 apart here, whoever attends.
    for prompt, record, again in zip(prompts, records, engine(False, **ours).generate(whole, scored), strict=True):
        expected = again.prompt_log_probs
        assert expected is not None
        assert record.generated_log_probs == pytest.approx(expected[len(prompt) - 1 :], abs=0.2)


def small(backend: str | None = None, **fields: Any) -> GPTModel:
    shape = {"num_layers": 3, "hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 1, "vocab_size": 64, "init_method_std": 0.3}
    options: dict[str, Any] = {"backend": fields.pop("exact", None), "dtype": fields.pop("dtype", torch.float64)}
    options |= {"device": fields.pop("device", "cpu")}
    config = TransformerConfig(**shape | {"window_size": (6, 0), "window_attn_skip_freq": 2} | fields)
    return GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(backend=backend), seed=0, **options).eval()


SIZES = InferenceConfig(max_sequence_length=48, num_blocks=24, block_size_tokens=4, max_requests=4, max_tokens=12)
ALONE = ExecutionConfig(use_graphs=False, run_ahead=False)


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.usefixtures("libraries")
def test_an_engine_draws_the_same_tokens_by_every_backend(backend: str) -> None:
    prompts = [[1, 2, 3], list(range(30)), [5], [7] * 13, [9, 8]]
    params = SamplingParams(temperature=0, num_tokens_to_generate=12, return_log_probs=True)
    records = []
    for name in (None, "torch", backend):
        model = small(name)
        engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, SIZES), execution=ALONE)
        assert engine.context.cache.attention_backend == name
        assert isinstance(engine.context.builder.has_kernel, bool) and engine.context.builder.has_kernel == (name == backend)
        records.append(engine.generate(prompts, params))
    for other in records[1:]:
        for one, two in zip(records[0], other, strict=True):
            assert one.generated_tokens == two.generated_tokens
            assert one.generated_log_probs == pytest.approx(two.generated_log_probs, rel=1e-9)


@pytest.mark.usefixtures("libraries")
def test_what_plans_on_the_host_is_not_recorded() -> None:
    model = small("flashinfer")
    assert graph_obstacle(small("flash_attn_3")) is None and graph_obstacle(small("torch")) is None
    words = r'PagedAttention\(backend="flashinfer"\) of layers.0 plans each step on the host; use another backend'
    with pytest.raises(ValueError, match="use_graphs=True: " + words):
        DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, SIZES), execution=ExecutionConfig(use_graphs=True))


@pytest.mark.usefixtures("libraries")
def test_layers_of_a_model_share_the_workspace_of_a_library() -> None:
    cores = [layer.mixer.core for layer in small("flashinfer").layers.values()]
    assert len({id(core._library) for core in cores}) == 1 and len({id(core) for core in cores}) == 3


LATENT = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sink": ({"softmax_type": "learnable"}, {}, "softmax_type='learnable', and the library's softmax has no sink"),
    "off by one": ({"softmax_type": "off-by-one"}, {}, "softmax_type='off-by-one'"),
    "width": ({"kv_channels": 20}, {}, "head_dim=20, and (FlashAttention 3|flashinfer) takes"),
    "latents": (
        {"latent_attention": LATENT, "num_query_groups": 2, "window_size": None, "window_attn_skip_freq": None}, {}, "caches latents",
    ),
    "fp8": ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    "dtype": ({"dtype": torch.bfloat16}, {}, "is in torch.bfloat16 and its cache in torch.bfloat16"),
    "soft cap": ({"attn_logit_softcapping": 5.0}, {}, "has attn_logit_softcapping=5.0, and the library"),
    "bits": ({"exact": choose_backend(batch_invariant=True)}, {}, "batch_invariant=True, and the library"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.usefixtures("libraries")
def test_what_a_library_cannot_compute_is_refused_by_name_before_a_cache_is_made(backend: str, kind: str) -> None:
    fields, sizes, words = REFUSED[kind]
    model = small(backend, **fields)
    with pytest.raises(ValueError, match=rf'PagedAttention\(backend="{backend}"\): layers.0 .*{words}.*; leave backend at None'):
        DynamicInferenceContext.for_model(model, dataclasses.replace(SIZES, **sizes))


def test_libraries_and_kernels_need_a_gpu(libraries: FlashAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'backend="triton"\): layers.0 is in torch.float64 on cpu .* blocks of a multiple of 16 tokens'):
        DynamicInferenceContext.for_model(small("triton"), SIZES)
    monkeypatch.setattr(_backends, "_DEVICE_TYPES", ("cuda",))
    with pytest.raises(ValueError, match="is on cpu, and the library needs a GPU"):
        DynamicInferenceContext.for_model(small("flashinfer"), SIZES)
    assert not libraries.calls


def test_heads_too_wide_for_the_kernels_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "has_kernels", lambda *_: True)
    place = torch.device("cpu")
    for dtype, widest in ((torch.bfloat16, 512), (torch.float32, 256)):
        pages = PageFormat(dtype=dtype, device=place, block_size=64, head_dim=widest)
        wider = dataclasses.replace(pages, head_dim=widest + 2)
        assert _backends.reads_tables(None, pages, dtype) and not _backends.reads_tables(None, wider, dtype)
        spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=widest + 2, dtype=dtype)
        words = rf"heads of {widest + 2} channels; the kernels take .* up to 512 channels \(256 in 32 bits\)"
        assert re.search(words, PagedAttention(backend="triton").obstacle(spec, wider) or "")
    cache = PagedKVCache.allocate(
        num_layers=1, num_blocks=2, block_size=16, num_kv_heads=1, head_dim=514, dtype=torch.bfloat16, device=place
    )
    assert PageFormat.of(cache).head_dim == 514 and not _backends.reads_tables(None, PageFormat.of(cache), torch.bfloat16)


@pytest.mark.usefixtures("libraries")
def test_flash_attention_3_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    core = PagedAttention(backend="flash_attn_3")
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float32)
    pages = PageFormat(dtype=torch.float32, device=torch.device("cuda", 0), block_size=64)
    monkeypatch.setattr(_backends, "_DEVICE_TYPES", ("cuda",))
    assert "is on cuda:0 of compute capability 10.0" in (core.obstacle(spec, pages) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert core.obstacle(spec, pages) is None


@pytest.mark.usefixtures("libraries")
def test_a_context_and_a_model_have_one_backend() -> None:
    plain, other = small(), small("flash_attn_3")
    with pytest.raises(ValueError, match=r"attention_backend=None, and the model has PagedAttention\(backend='flash_attn_3'\)"):
        DynamicInferenceEngine(other, DynamicInferenceContext.for_model(plain, SIZES), execution=ALONE)
    mixed = small()
    mixed.layers["1"].mixer.core = other.layers["1"].mixer.core
    with pytest.raises(ValueError, match=r"None in layers.2, 'flash_attn_3' in layers.1; build the model with one PagedAttention"):
        DynamicInferenceContext.for_model(mixed, SIZES)
    context = DynamicInferenceContext.for_model(plain, SIZES)
    context.add_request(0)
    context.extend(0, 2)
    with pytest.raises(TypeError, match=r'backend="flash_attn_3"\) reads no GatheredRows'):
        other(*_tokens_and_step(context))


def _tokens_and_step(context: DynamicInferenceContext) -> tuple[Tensor, Step]:
    inputs = context.build_step([(0, [1, 2])])
    return inputs.tokens_T, inputs.step


@pytest.mark.parametrize(
    ("backend", "kind", "words"),
    [
        ("flash_attn_3", ModuleNotFoundError, "flash_attn_interface is not installed: build FlashAttention 3, folder hopper of"),
        ("flashinfer", ModuleNotFoundError, r'flashinfer is not installed: pip install "mcore-inference\[flashinfer\]"'),
        ("transformer_engine", ValueError, "pages that its InferenceParams allocates and numbers itself"),
        ("te", ValueError, "backend='te' cannot read this cache"),
        ("cudnn", ValueError, "backend='cudnn' of PagedAttention is unknown; use one of 'triton', 'torch', 'flash_attn_3', 'flashinfer'"),
    ],
)
def test_backends_that_are_not_there_are_named(backend: str, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library, adapter in zip(("flash_attn_interface", "flashinfer"), ADAPTERS.values(), strict=True):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, adapter, raising=False)
    with pytest.raises(kind, match=words) as caught:
        PagedAttention(backend=backend)
    assert "\n" not in str(caught.value)


# -- rotation by flashinfer ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("lengths", [(1, 1), (1, 5), (6,)])
def test_heads_turned_by_flashinfer_are_those_that_the_trunk_turns(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    total, model = sum(lengths), small("flash_attn_3")
    contexts = []
    for rotation in (load_rotation(required=True), None):
        context = DynamicInferenceContext(
            model.config, SIZES, dtype=torch.float64, num_layers=3, attention_backend="flash_attn_3", rotation=rotation
        )
        for number, length in enumerate(lengths):
            context.add_request(number)
            context.extend(number, length)
        contexts.append(context)
    steps = [context.build_step([(n, [0] * length) for n, length in enumerate(lengths)]).step for context in contexts]
    tables = model.rotary(torch.arange(total) * 3)
    qkv = torch.randn(total, 1, 4, 64, dtype=torch.float64)
    core = model.layers["0"].mixer.core
    q, k = (apply_rotary(x, tables) for x in (qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2]))
    wanted = core(q, k, qkv[:, :, -1], 0, steps[1])
    got = core.attend_packed(PackedHeads(qkv=qkv, tables=tables), 0, steps[0])
    # The library's tables are in float32.
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(contexts[0].cache.pages, contexts[1].cache.pages, rtol=1e-5, atol=1e-5)
    assert contexts[0].cache.pages[0].any() and not contexts[0].cache.pages[1].any()


@pytest.mark.usefixtures("libraries")
@torch.no_grad()
def test_a_step_whose_heads_come_turned_is_refused_where_the_rotation_is_required() -> None:
    model = small()
    for required in (True, False):
        context = DynamicInferenceContext(model.config, SIZES, dtype=torch.float64, num_layers=3, rotation=load_rotation(required=required))
        context.add_request(0)
        context.extend(0, 2)
        if not required:
            model(*_tokens_and_step(context))
            continue
        with pytest.raises(RuntimeError, match="use_flashinfer_fused_rope=True, and the engine runs this model by its own forward"):
            model(*_tokens_and_step(context))


@pytest.mark.parametrize(
    ("fields", "dtype", "device", "words"),
    [
        ({}, torch.bfloat16, "cpu", "is in torch.bfloat16 on cpu"),
        ({}, torch.float32, "cuda", "is in torch.float32 on cuda"),
        ({"rotary_percent": 0.5}, torch.bfloat16, "cuda", "rotary_percent=0.5"),
        ({"rotary_interleaved": True}, torch.bfloat16, "cuda", "rotary_interleaved=True"),
        ({"qk_layernorm": True}, torch.bfloat16, "cuda", "layers.0 has latents, or norms of its heads"),
    ],
)
@pytest.mark.usefixtures("libraries")
def test_heads_that_flashinfer_does_not_turn_are_refused_by_name(
    fields: dict[str, Any], dtype: torch.dtype, device: str, words: str
) -> None:
    model = small(**fields)
    with pytest.raises(ValueError, match=f"use_flashinfer_fused_rope=True: .*{words}.*; leave it at None"):
        head_rotation(model, True, dtype, torch.device(device))
    assert head_rotation(model, None, dtype, torch.device(device)) is None


def test_the_rotation_is_chosen_where_its_library_is(libraries: FlashAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    model, place = small(), (torch.bfloat16, torch.device("cuda"))
    assert head_rotation(model, False, *place) is None and not libraries.calls
    assert [rotation.required for wanted in (True, None) if (rotation := head_rotation(model, wanted, *place)) is not None] == [True, False]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, ADAPTERS["flashinfer"])
    assert head_rotation(model, None, *place) is None
    with pytest.raises(ModuleNotFoundError, match=r"mcore-inference\[flashinfer\]"):
        head_rotation(model, True, *place)
    with pytest.raises(ValueError, match=r"use_flashinfer_fused_rope=True .*DynamicInferenceContext.for_model"):
        DynamicInferenceContext(model.config, dataclasses.replace(SIZES, use_flashinfer_fused_rope=True))
    with pytest.raises(ValueError, match="use_flashinfer_fused_rope=True: the model is in torch.float64 on cpu"):
        DynamicInferenceContext.for_model(model, dataclasses.replace(SIZES, use_flashinfer_fused_rope=True))
    with pytest.raises(ValueError, match="use_flashinfer_fused_rope"):
        InferenceConfig(use_flashinfer_fused_rope=1)  # pyright: ignore[reportArgumentType]
