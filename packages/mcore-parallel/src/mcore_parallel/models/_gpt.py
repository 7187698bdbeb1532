# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The decoder-only transformer, whole or one pipeline stage of it."""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._init import fill_parameters
from mcore_parallel.models._layer import TransformerLayer, build_norm, dense_feed_forward, self_attention
from mcore_parallel.models._memory import StageMemory
from mcore_parallel.models._output import ModelOutput, OutputLayer
from mcore_parallel.models._slots import FeedForwardBuilder, MixerBuilder, Site
from mcore_parallel.nn import AttentionCore, OffloadConfig, RecomputeConfig, Step, default_attention, rotary_frequencies, rotary_tables
from mcore_parallel.pipeline import StageLayout, partition_layers
from mcore_parallel.tensor_parallel import VocabParallelEmbedding


# T tokens, D model.
class GPTModel(nn.Module):
    """Embedding, layers, final norm, output; each pipeline stage holds its share.

    Parameter names are global: ``layers.17.attention.qkv.weight`` whatever stage holds layer 17.

    With tied embeddings the first and the last of several stages hold a copy of ``embedding.weight`` each, which start equal and whose
    gradients are summed over the ``embd`` group (``ShardSpec.partial``); the output layer is then the last stage's ``embedding``.

    Args:
        config: the architecture.
        groups: the layout.
        feed_forward: fills the feed-forward slot of every layer.
        mixer: fills the mixer slot; None for self-attention around ``attention_core``.
        attention_core: None for causal attention: torch's, or a ring over cp.
        layers: global numbers of the layers held here; None for this stage's share by ``partition_layers``. A ``StageLayout``
            (from a ``PipelineLayout``) also says whether this is the virtual stage with the embedding or with the output.
        recompute: what the backward computes again instead of keeping it; None for nothing. The results have the same bits.
        offload: which activations wait in host memory for their backward; None for none. The results have the same bits.
        unpadded_vocab_size: rows of the vocabulary that are real; losses leave the padding after them out. None for all.
        dtype: of the parameters and the hidden states.
        device: of the parameters. With "meta" nothing is allocated or initialised: call ``to_empty``, then ``init_parameters`` or load.
        seed: of the initial values; None leaves them uninitialised.

    Raises:
        ValueError: degrees that do not divide the sizes, mixer and attention_core together, recomputation and offloading of the
            same part, tied embeddings whose ends are neither one chunk nor on the first and the last stage.

    Example:
        >>> config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16)
        >>> output, aux = GPTModel(config, ProcessGroups.single())(torch.zeros(4, dtype=torch.int64), Step.causal(2, 2))
        >>> output.logits().shape
        torch.Size([4, 16])
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroups,
        *,
        feed_forward: FeedForwardBuilder = dense_feed_forward,
        mixer: MixerBuilder | None = None,
        attention_core: AttentionCore | None = None,
        layers: range | StageLayout | None = None,
        recompute: RecomputeConfig | None = None,
        offload: OffloadConfig | None = None,
        unpadded_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        stages = groups.pp
        if mixer is not None and attention_core is not None:
            raise ValueError("mixer and attention_core exclude one another; give the core to the mixer's builder")
        self.is_first, self.is_last = stages.is_first, stages.is_last
        if isinstance(layers, StageLayout):
            if layers.mtp_layers:
                raise ValueError(f"layers={layers} places mtp_layers, which GPTModel does not hold; leave m out of the layout")
            self.is_first, self.is_last, layers = layers.embedding, layers.loss, layers.layers
        if layers is None:
            layers = partition_layers(config.num_layers, stages.size, stages.rank)
        elif not 0 <= layers.start <= layers.stop <= config.num_layers:
            raise ValueError(f"layers={layers} must lie in range(0, num_layers={config.num_layers})")
        tied = config.share_embeddings_and_output_weights
        shared = tied and self.is_first != self.is_last
        if shared and not (stages.size > 1 and (stages.is_first if self.is_first else stages.is_last)):
            raise ValueError(
                f"share_embeddings_and_output_weights=True needs embedding and output in one chunk, or on the first and the last of "
                f"several stages, found one of them on stage {stages.rank} of pp={stages.size}; change the layout or untie the weights"
            )
        self.memory = StageMemory(recompute, offload, len(layers), groups, own_core=mixer is None)
        mixer = self_attention(self.memory.core(attention_core or default_attention(groups))) if mixer is None else mixer
        self.config, self.groups, self.stage_layers = config, groups, layers
        self.dtype = dtype
        sizes = (config.vocab_size, config.hidden_size, groups)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        ends: dict[str, Any] = {**place, "partial": ("embd",) if shared else ()}

        def site(layer: int) -> Site:
            return Site(layer=layer, local_layer=layer - layers.start, config=config, groups=groups, dtype=dtype, device=device)

        self.embedding = VocabParallelEmbedding(*sizes, init=False, **ends) if self.is_first else None
        self.layers = nn.ModuleDict(
            {str(layer): TransformerLayer(site(layer), mixer, feed_forward, self.memory.layer(layer - layers.start)) for layer in layers}
        )
        self.final_norm = build_norm(site(layers.stop)) if self.is_last else None
        output = OutputLayer(*sizes, tied=tied and not shared, unpadded_vocab_size=unpadded_vocab_size, **ends) if self.is_last else None
        self._holds_copy = shared and self.is_last
        if self._holds_copy:
            # The copy bears the name of the table, and hooks find it in the module that uses it.
            self.embedding, output = output, None
        self.output = output
        if seed is not None and torch.device(device).type != "meta":
            init_parameters(self, seed)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor | ModelOutput, Tensor | None]:
        """One pass through this stage.

        Args:
            x: tokens [T] int64 on the first stage, else the hidden states [T or T / tp, D] of the stage before.
            step: positions and attention data of all T tokens.

        Returns:
            Hidden states [T or T / tp, D], on the last stage a ``ModelOutput``; and this rank's part of the auxiliary loss, or None.

        Raises:
            ValueError: under sequence parallelism, tp does not divide T.
        """
        tokens = step.positions.shape[0]
        if self.groups.sequence_parallel and tokens % self.groups.tp.size:
            raise ValueError(
                f"tp={self.groups.tp.size} must divide the {tokens} tokens of a step; pad the batch or set sequence_parallel=False"
            )
        if step.rotary is None:
            step = dataclasses.replace(step, rotary=self.rotary(step.positions))
        if self.embedding is not None and not self._holds_copy:
            x = self.embedding(x)
        x, aux_total = self.memory.run(list(self.layers.values()), x, step)
        layer = cast(OutputLayer, self.embedding) if self._holds_copy else self.output
        if self.final_norm is None or layer is None:
            return x, aux_total
        tied = self.config.share_embeddings_and_output_weights and not self._holds_copy
        shared = self.embedding.weight if tied and self.embedding is not None else None
        return ModelOutput(self.final_norm(x), layer, shared), aux_total

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, d] of the positions [T], float32."""
        return rotary_tables(positions, rotary_frequencies(self.config.head_dim, self.config.rotary_base, positions.device))


def init_parameters(model: GPTModel, seed: int) -> None:
    """Draw all parameters of a model; every layout gets the same global values.

    A value depends on the seed and the parameter's global name only. Norm weights are 1, biases 0; matrices are N(0, std^2) with
    ``init_method_std``, divided by sqrt(2 num_layers) for those that write into the residual stream. A module that conforms
    to ``SelfInitialised`` overrides these rules. Values are drawn in float32 on the CPU, one leading index at a time for
    parameters of more than two dims, of which only the indices held here are drawn.

    Raises:
        ValueError: the parameters lie on the meta device.
    """
    fill_parameters(model, model.config, model.groups, seed)
