# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The decoder-only stack of any layers, whole or one pipeline stage of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mcore_parallel.backends import Backend, TorchBackend
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models._aux import Aux, AuxSpec
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._cores import rotary_config
from mcore_parallel.models._init import fill_parameters
from mcore_parallel.models._layer import build_norm, dense_feed_forward, self_attention
from mcore_parallel.models._layout import check_batch_invariant, check_layout, is_dense
from mcore_parallel.models._memory import StageMemory
from mcore_parallel.models._mixers import delta_net_mixer, latent_attention, mamba_mixer
from mcore_parallel.models._mtp import TokenDepth, predict_further
from mcore_parallel.models._output import ModelOutput, OutputLayer
from mcore_parallel.models._slots import FeedForwardBuilder, MixerBuilder, Site
from mcore_parallel.models._stack import LayerStack, depth_symbols, place_stage, shares_table
from mcore_parallel.nn import (
    AttentionCore,
    AttentionCoreBuilder,
    ContextParallelBuilder,
    DrawsNoise,
    LearnedPositions,
    OffloadConfig,
    RecomputeConfig,
    Step,
)
from mcore_parallel.pipeline import StageLayout
from mcore_parallel.tensor_parallel import BatchInvariantProducts, VocabParallelEmbedding, one_by_one


# T tokens, D model.
class GPTModel(nn.Module):
    """Embedding, layers, final norm, output; each pipeline stage holds its share.

    A layer is attention and feed-forward, or what ``config.hybrid_layer_pattern`` says. Parameter names are global:
    ``layers.17.attention.qkv.weight`` whatever stage holds layer 17.

    With ``config.mtp_num_layers`` the last stage also holds heads that predict further tokens (``mtp.0.*``), and looks its tokens'
    embeddings up itself. They run in training mode only.

    With tied embeddings or such heads the first and the last of several stages hold a copy of ``embedding.weight`` each, which start
    equal and whose gradients are summed over the ``embd`` group (``ShardSpec.partial``); the output layer of tied embeddings is then the
    last stage's ``embedding``, unless there are heads.

    Args:
        config: the architecture.
        groups: the layout.
        feed_forward: fills the feed-forward slot of every layer; with a pattern, of its E.
        mixer: fills the mixer slot; None for self-attention around ``attention_core``. With a pattern, that of its * and +.
        attention_core: one for all layers, or an ``AttentionCoreBuilder``; None for ``choose_attention`` by the config.
        layers: global numbers of the layers held here; None for this stage's share by ``partition_layers``, or by the segments of the
            pattern. A ``StageLayout`` (from a ``PipelineLayout``) also says whether this is the virtual stage with the embedding or
            with the output.
        layer_configs: configs of layers that differ from the others, by global number; what all layers share must be equal.
        recompute: what the backward computes again instead of keeping it; None for nothing. The results have the same bits.
        offload: which activations wait in host memory for their backward; None for none. The results have the same bits.
        backend: who computes norms and projections (``mcore_parallel.backends.choose_backend``); None for torch in ``dtype``.
        unpadded_vocab_size: rows of the vocabulary that are real; losses leave the padding after them out. None for all.
        dtype: of the parameters and the hidden states.
        device: of the parameters. With "meta" nothing is allocated or initialised: call ``to_empty``, then ``init_parameters`` or load.
        seed: of the initial values; None leaves them uninitialised.

    Raises:
        ValueError: degrees that do not divide the sizes, mixer and attention_core together, recomputation and offloading of the
            same part, tied embeddings or heads whose ends are neither one chunk nor on the first and the last stage, a layout or
            pattern that does not fit.

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
        attention_core: AttentionCore | AttentionCoreBuilder | None = None,
        layers: range | StageLayout | None = None,
        layer_configs: Mapping[int, TransformerConfig] | None = None,
        recompute: RecomputeConfig | None = None,
        offload: OffloadConfig | None = None,
        backend: Backend | None = None,
        unpadded_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        stages = groups.pp
        self.config, self.groups, self.dtype = config, groups, dtype
        self.backend: Backend = TorchBackend() if backend is None else backend
        if config.post_norm:
            raise ValueError("post_norm=True normalises sums and leaves nothing before the output; use BertModel, or set it to False")
        if mixer is not None and attention_core is not None:
            raise ValueError("mixer and attention_core exclude one another; give the core to the mixer's builder")
        here = place_stage(config, stages, layers)
        check_layout(
            config,
            groups.plan,
            feed_forward=feed_forward,
            attention_core=attention_core,
            own_mixer=mixer is not None,
            ends=here.embedding or here.loss,
            layer_configs=(layer_configs or {}).values(),
            dtype=dtype,
            device=device,
        )
        exact = isinstance(self.backend, TorchBackend) and self.backend.batch_invariant
        if exact:
            own_core = mixer is not None or _is_bare(attention_core)
            check_batch_invariant(config, groups, feed_forward=feed_forward, own_core=own_core, dtype=dtype, device=device)
        self.is_first, self.is_last, held, depths = here.embedding, here.loss, here.layers, here.mtp_layers
        tied, shared = config.share_embeddings_and_output_weights, shares_table(config, stages, here)
        further = len(depths) > 0
        own = len(depth_symbols(config)) if further else 0
        num_layers = len(held) + own * len(depths)
        noise_fields = feed_forward.noise_fields if isinstance(feed_forward, DrawsNoise) else ""
        self.memory = StageMemory(
            recompute, offload, num_layers, groups, own_core=mixer is None, dense=is_dense(feed_forward), noise_fields=noise_fields
        )
        if mixer is None and config.latent_attention is not None:
            mixer = latent_attention(attention_core, manage=self.memory.core)
        elif mixer is None:
            mixer = self_attention(attention_core, manage=self.memory.core)
        mixers = {"*": mixer, "+": mixer, "M": mamba_mixer(), "G": delta_net_mixer()}
        stack = LayerStack(config=config, mixers=mixers, feed_forward=feed_forward, layer_configs=layer_configs or {})
        self.stage_layers = held
        self.aux_specs: Mapping[int, AuxSpec] = stack.aux_specs()
        sizes = (config.vocab_size, config.hidden_size, groups)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        ends: dict[str, Any] = {**place, "partial": ("embd",) if shared else ()}

        def site(layer: int, local_layer: int) -> Site:
            parts = self.backend.layers(layer, config.num_layers)
            return Site(
                layer=layer,
                local_layer=local_layer,
                config=config,
                groups=groups,
                dtype=dtype,
                device=device,
                layers=parts,
                batch_invariant=exact,
            )

        def depth(number: int) -> TokenDepth:
            first = number * own
            sites = [site(config.num_layers + first + i, len(held) + first + i) for i in range(own)]
            symbols = zip(sites, depth_symbols(config), strict=True)
            return TokenDepth(sites[0], [stack.depth_layer(at, self.memory.layer(at.local_layer), symbol) for at, symbol in symbols])

        self.embedding = VocabParallelEmbedding(*sizes, init=False, **ends) if self.is_first or further else None
        self.position_embedding = self._learned_positions(**place) if self.is_first or further else None
        self.layers = nn.ModuleDict(
            {str(layer): stack.layer(site(layer, local), self.memory.layer(local)) for local, layer in enumerate(held)}
        )
        self.final_norm = build_norm(site(held.stop, len(held))) if self.is_last else None
        # Where the table is here anyway, tied logits are computed with it.
        copied = tied and shared and not further
        output_ends = ends if tied else place
        output_ends = {**output_ends, "unpadded_vocab_size": unpadded_vocab_size, "loss": self.backend.output_loss()}
        output_ends["softcap"] = config.final_logit_softcapping
        output = OutputLayer(*sizes, tied=tied and not copied, **output_ends) if self.is_last else None
        if output is not None and exact:
            output.products = BatchInvariantProducts()
        self._holds_copy = copied and self.is_last
        if self._holds_copy:
            # The copy bears the name of the table, and hooks find it in the module that uses it.
            self.embedding, output = output, None
        self.output = output
        self.mtp = nn.ModuleDict({str(number): depth(number) for number in depths}) if further else None
        if seed is not None and torch.device(device).type != "meta":
            init_parameters(self, seed)

    def check_noise(self, noise_fields: str) -> None:
        """As of ``mcore_parallel.tensor_parallel.RecomputedModel``."""
        self.memory.check_noise(noise_fields)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor | ModelOutput, Aux | None]:
        """One pass through this stage.

        Args:
            x: tokens [T] int64 on the first stage, else the hidden states [T or T / tp, D] of the stage before.
            step: positions and attention data of all T tokens.

        Returns:
            Hidden states [T or T / tp, D], on the last stage a ``ModelOutput``; and what the layers return beside (``Aux``), or None.

        Raises:
            ValueError: under sequence parallelism, tp does not divide T.
        """
        tokens = step.positions.shape[-1]
        if self.groups.sequence_parallel and tokens % self.groups.tp.size:
            raise ValueError(
                f"tp={self.groups.tp.size} must divide the {tokens} tokens of a step; pad the batch or set sequence_parallel=False"
            )
        if step.rotary is None:
            positions = step.positions
            step = dataclasses.replace(step, rotary=self.rotary(positions), rotary_window=self.rotary(positions, window=True))
        tokens = x if self.is_first else step.tokens
        if self.is_first:
            x = self.embed(x, step)
        with self.backend.running(self.groups):
            x, aux = self.memory.run(list(self.layers.values()), x, step)
        if self.final_norm is None:
            return x, aux
        hidden = self.final_norm(x)
        further, aux_further = self._predict_further(hidden, tokens, step)
        depths = tuple(self.output_of(states, detached=self.config.mtp_detach) for states in further)
        return self.output_of(hidden, depths=depths), Aux.merged([aux, aux_further])

    def predict_ahead(self, depth: int, hidden: Tensor, tokens: Tensor, step: Step) -> tuple[Tensor, ModelOutput]:
        """One of the heads that predict further tokens, in training mode or not: what a draft of several tokens runs.

        Args:
            depth: number of the head, from 0.
            hidden: [T or T / tp, D] behind the final norm: of the model, or of the head before.
            tokens: [T] int64, those ``depth + 1`` places behind the ones that ``hidden`` is of.
            step: of the tokens of ``hidden``.

        Returns:
            The head's states [T or T / tp, D], and its prediction of the tokens ``depth + 2`` places behind.

        Raises:
            ValueError: the model has no such head on this stage.
        """
        if self.mtp is None or str(depth) not in self.mtp:
            raise ValueError(f"depth={depth}: the model has mtp_num_layers={self.config.mtp_num_layers}, all on the last stage; name one")
        if step.rotary is None:
            positions = step.positions
            step = dataclasses.replace(step, rotary=self.rotary(positions), rotary_window=self.rotary(positions, window=True))
        states, _ = cast(TokenDepth, self.mtp[str(depth)])(hidden, self.embed(tokens, step), step, self.memory)
        return states, self.output_of(states)

    def output_of(self, hidden: Tensor, *, detached: bool = False, depths: tuple[ModelOutput, ...] = ()) -> ModelOutput:
        """Of states behind a final norm, on the last stage."""
        layer = cast(OutputLayer, self.embedding if self._holds_copy else self.output)
        tied = self.config.share_embeddings_and_output_weights and not self._holds_copy
        shared = self.embedding.weight if tied and self.embedding is not None else None
        return ModelOutput(_scaled(hidden, self.config.output_multiplier), layer, shared, depths=depths, detached=detached)

    def embed(self, tokens: Tensor, step: Step) -> Tensor:
        """Token ids [T] -> [T or T / tp, D], on a stage that holds the table."""
        x, factor = cast(VocabParallelEmbedding, self.embedding)(tokens), self.config.embedding_multiplier
        x = x if factor == 1.0 else x * factor
        return x if self.position_embedding is None else x + self.position_embedding(step.positions)

    def _learned_positions(self, **place: Any) -> LearnedPositions | None:
        config = self.config
        if config.position_embedding_type != "learned_absolute" or config.max_position_embeddings is None:
            return None
        # The last stage looks up positions too when it has heads that predict further tokens.
        partial = ("embd",) if config.mtp_num_layers and self.is_first != self.is_last else ()
        return LearnedPositions(config.max_position_embeddings, config.hidden_size, self.groups, partial=partial, **place)

    def _predict_further(self, hidden: Tensor, tokens: Tensor | None, step: Step) -> tuple[list[Tensor], Aux | None]:
        """Hidden states of the depths, and what their layers return beside; none outside training."""
        if self.mtp is None or not self.training:
            return [], None
        if tokens is None:
            raise ValueError(
                f"mtp_num_layers={self.config.mtp_num_layers} needs step.tokens on the last stage; make the step with Batch.step()"
            )
        shared: dict[str, Any] = {"memory": self.memory, "config": self.config, "cp": self.groups.cp}
        return predict_further(self.mtp, hidden, tokens, step, embed=lambda ids: self.embed(ids, step), **shared)

    def rotary(self, positions: Tensor, *, window: bool = False) -> tuple[Tensor, Tensor] | None:
        """cos and sin [T, channels of a head that turn] of the positions [T] or [C, T], float32; None where nothing turns.

        Args:
            positions: as of ``Step``.
            window: of the layers with a window; None unless they have a base of their own.
        """
        turns = rotary_config(self.config, window=window)
        if turns is None:
            return None
        if isinstance(self.backend, TorchBackend) and self.backend.batch_invariant and not positions.is_cuda:
            # Components of a position are the first dim.
            cos, sin = one_by_one(lambda part: torch.stack(turns.tables(part.movedim(0, -1)), dim=1), positions.movedim(-1, 0)).unbind(1)
            return cos.contiguous(), sin.contiguous()
        return turns.tables(positions)


def _is_bare(core: object) -> bool:
    """Whether an attention core is not told what a layer asks for, or does not follow ``AttentionSpec.batch_invariant``."""
    return isinstance(core, ContextParallelBuilder) or (core is not None and not isinstance(core, AttentionCoreBuilder))


def _scaled(hidden: Tensor, factor: float) -> Tensor:
    """Hidden states whose logits are ``factor`` times as large, whichever way logits are used."""
    return hidden if factor == 1.0 else hidden * factor


def init_parameters(model: GPTModel, seed: int) -> None:
    """Draw all parameters of a model; every layout gets the same global values.

    A value depends on the seed and the parameter's global name only. Norm weights are 1, biases 0; matrices are N(0, std^2) with
    ``init_method_std``, divided by sqrt(2 num_layers) for those that write into the residual stream. A module that conforms
    to ``SelfInitialised`` overrides these rules. Values are drawn in float32 on the CPU, one leading index at a time for
    parameters of more than two dims, of which only the indices held here are drawn. Persistent buffers are zero.

    Raises:
        ValueError: the parameters lie on the meta device.
    """
    fill_parameters(model, model.config, model.groups, seed)
