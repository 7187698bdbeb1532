# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine for fixed batches: each is generated to the end before the next begins."""

from collections.abc import Sequence

from mcore_inference._capability import shares_experts
from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api
from mcore_inference.context import DynamicInferenceContext, InferenceConfig
from mcore_inference.engine._engine import DynamicInferenceEngine
from mcore_inference.engine._executor import ExecutionConfig
from mcore_inference.engine._offline import completions_of, loras_of, settings_of
from mcore_inference.requests import DynamicInferenceRequestRecord, Prompt
from mcore_inference.sampling import SamplingParams
from mcore_inference.text import Tokenizer
from mcore_parallel.models import GPTModel

__all__ = ["StaticInferenceEngine"]

# A multiple of what the attention kernels need, and little is lost at the end of a sequence.
_BLOCK_TOKENS = 64


@experimental_api
class StaticInferenceEngine:
    """Generates completions batch by batch, with memory for ``max_batch_size`` sequences of the greatest length.

    A batch is what runs together: no completion joins it later, and none is preempted. ``DynamicInferenceEngine`` is faster where
    completions end at different times, since others take their places.

    Args:
        model: as for ``DynamicInferenceEngine``.
        tokenizer: as there.
        max_batch_size: completions of a batch.
        max_sequence_length: longest prompt and output together.
        seed: of completions that bring none.
        execution: how the device is driven; None for the defaults.

    Example:
        >>> from mcore_inference import PagedAttention
        >>> from mcore_parallel import ProcessGroups
        >>> from mcore_parallel.models import TransformerConfig
        >>> config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16)
        >>> model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention())
        >>> engine = StaticInferenceEngine(model, max_batch_size=2, max_sequence_length=64)
        >>> [len(record.generated_tokens) for record in engine.generate([[1, 2], [3], [4]], SamplingParams(num_tokens_to_generate=5))]
        [5, 5, 5]

    Raises:
        ValueError: the model cannot be served (``EngineCapability``), or a size is out of its range; nothing is allocated then.
    """

    def __init__(
        self,
        model: GPTModel,
        tokenizer: Tokenizer | None = None,
        *,
        max_batch_size: int,
        max_sequence_length: int = 2560,
        seed: int = 0,
        execution: ExecutionConfig | None = None,
    ) -> None:
        if shares_experts(model):
            raise ValueError(
                f"ep={model.groups.ep.size} shares experts with ranks whose batches may be fewer or more; use DynamicInferenceEngine, "
                "whose generate ends on all ranks together"
            )
        self.max_batch_size = as_integer("max_batch_size", max_batch_size, 1, 2**24)
        seed = as_integer("seed", seed, -(2**63), 2**63 - 1)
        length = as_integer("max_sequence_length", max_sequence_length, 1, 2**31)
        sizes = InferenceConfig(
            max_sequence_length=length,
            max_requests=self.max_batch_size,
            block_size_tokens=_BLOCK_TOKENS,
            num_blocks=self.max_batch_size * -(-length // _BLOCK_TOKENS),
            watermark=0.0,
        )
        context = DynamicInferenceContext.for_model(model, sizes)
        self.engine = DynamicInferenceEngine(model, context, tokenizer, seed=seed, execution=execution)
        """What runs a batch; for ``load_weights``, ``suspend``, ``stats``. It must be idle when ``generate`` is called."""

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[DynamicInferenceRequestRecord]:
        """Generate for these prompts, ``max_batch_size`` completions at a time.

        Args:
            prompts: text or token ids.
            sampling_params: for all, or one for each prompt.

        Returns:
            As ``DynamicInferenceEngine.generate``.

        Raises:
            ValueError: the engine is busy, or the settings do not fit the prompts; nothing was generated then.
        """
        completions = completions_of(prompts, settings_of(prompts, sampling_params), loras_of(prompts, None))
        records: list[DynamicInferenceRequestRecord] = []
        for start in range(0, len(completions), self.max_batch_size):
            batch = completions[start : start + self.max_batch_size]
            records += self.engine.generate([prompt for prompt, _, _ in batch], [params for _, params, _ in batch])
        return records
