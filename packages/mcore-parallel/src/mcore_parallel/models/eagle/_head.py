# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A small decoder that goes on from the hidden states of a large one."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.context_parallel import sequence_lengths, tokens_ahead
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models._cores import rotary_config
from mcore_parallel.models._init import fill_parameters
from mcore_parallel.models._layer import TransformerLayer, build_norm, dense_feed_forward, self_attention
from mcore_parallel.models._layout import check_layout
from mcore_parallel.models._output import ModelOutput, OutputLayer
from mcore_parallel.models._slots import Site
from mcore_parallel.models.eagle._config import EagleConfig
from mcore_parallel.models.eagle._unrolled import DraftRows, UnrolledAttention
from mcore_parallel.models.eagle._vocabulary import DraftVocabulary
from mcore_parallel.nn import AttentionCore, AttentionCoreBuilder, Step
from mcore_parallel.tensor_parallel import ReplicatedLinear


# T tokens, D model, C modules of the target that are read, v tokens of the head.
class DraftLayer(nn.Module):
    """The first layer of a head: ``x + attention([norm(e), norm(x)])`` of states x and embeddings e, then ``x + feed_forward(norm(x))``.

    Args:
        site: where its parameters are made.
        attention_core: as of ``self_attention``.
    """

    def __init__(self, site: Site, attention_core: AttentionCore | AttentionCoreBuilder) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = build_norm(site), build_norm(site)
        self.attention = self_attention(attention_core, input_size=2 * site.config.hidden_size)(site)
        self.ffn_norm = build_norm(site)
        self.mlp = dense_feed_forward(site)

    def forward(self, hidden: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """Two [T or T / tp, D] -> the same."""
        x = hidden + self.attention(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1), step)
        return x + self.mlp(self.ffn_norm(x), step)[0]


class EagleHead(nn.Module):
    """Drafts tokens from what a target model makes of a text (EAGLE-3, Li et al., 2025, arXiv:2503.01840).

    ``fuse`` maps the outputs of several of the target's modules to states; ``draft`` turns the states of tokens and the embeddings of the
    tokens behind them into states of the latter, which it takes again; ``output`` gives the distributions of the tokens that follow.
    Embeddings are the target's. Parameters have global names and shard specs like those of any model of this wheel.

    Args:
        config: the architecture.
        groups: the layout; tp and data axes, no cp and no pp.
        vocabulary: the tokens that it proposes; None for all, which ``config.draft_vocab_size`` must ask for.
        attention_core: one for all layers, or a builder; None for ``UnrolledAttention``, which training needs.
        unpadded_vocab_size: rows of the target's vocabulary that are real, when the head has all of them; None for all.
        dtype: of the parameters.
        device: of the parameters; with "meta" nothing is initialised.
        seed: of the initial values; None leaves them uninitialised.

    Raises:
        ValueError: degrees that do not divide the sizes, a layout with cp or pp, another vocabulary than the config says.

    Example:
        >>> from mcore_parallel.models import TransformerConfig
        >>> target = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=16)
        >>> head = EagleHead(EagleConfig.of_target(target), ProcessGroups.single())
        >>> states = head.fuse([torch.zeros(6, 8)] * 2)
        >>> head.output(head.draft(states, torch.zeros(6, 8), Step.causal(2, 3))).logits().shape
        torch.Size([6, 16])
    """

    def __init__(
        self,
        config: EagleConfig,
        groups: ProcessGroups,
        *,
        vocabulary: DraftVocabulary | None = None,
        attention_core: AttentionCore | AttentionCoreBuilder | None = None,
        unpadded_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        sizes = config.transformer
        if groups.pp.size > 1 or groups.cp.size > 1:
            raise ValueError(f"pp={groups.pp.size} and cp={groups.cp.size} cut a head that is too small for it; set both to 1")
        held = None if vocabulary is None else (len(vocabulary), vocabulary.vocab_size)
        expected = None if config.draft_vocab_size is None else (config.draft_vocab_size, sizes.vocab_size)
        if held != expected:
            raise ValueError(
                f"vocabulary={held} (tokens, of how many) must be (draft_vocab_size, vocab_size)={expected}; "
                "count one of that size with DraftVocabulary.from_counts, or leave out both"
            )
        check_layout(sizes, groups.plan, ends=vocabulary is None)
        self.config, self.groups, self.vocabulary, self.dtype = sizes, groups, vocabulary, dtype
        self.architecture = config
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        core = UnrolledAttention(sizes.attention_backend) if attention_core is None else attention_core
        sites = [Site(layer=number, local_layer=number, config=sizes, groups=groups, **place) for number in range(sizes.num_layers)]
        width = len(config.aux_modules) * sizes.hidden_size
        self.fusion = ReplicatedLinear(width, sizes.hidden_size, groups, init=False, **place)
        layers: list[nn.Module] = [DraftLayer(sites[0], core)]
        layers += [TransformerLayer(site, self_attention(core), dense_feed_forward) for site in sites[1:]]
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
        self.final_norm = build_norm(sites[0])
        tokens = sizes.vocab_size if vocabulary is None else len(vocabulary)
        unpadded = unpadded_vocab_size if vocabulary is None else None
        self.output_layer = OutputLayer(tokens, sizes.hidden_size, groups, unpadded_vocab_size=unpadded, **place)
        if seed is not None and torch.device(device).type != "meta":
            fill_parameters(self, sizes, groups, seed)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """C outputs [T or T / tp, D] of the target's ``aux_modules`` -> states [T or T / tp, D].

        Raises:
            ValueError: another number of them.
        """
        if len(states) != len(self.architecture.aux_modules):
            raise ValueError(f"{len(states)} states do not fit aux_modules={self.architecture.aux_modules}; give one of each, in order")
        return self.fusion(torch.cat(list(states), dim=-1))

    def draft(self, hidden: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """States of the tokens behind: what the head knows when it has also read them.

        Args:
            hidden: [T or T / tp, D] of ``fuse``, or of the last call.
            embedded: [T or T / tp, D] embeddings of the tokens behind those of ``hidden``, as the target makes them.
            step: positions of the tokens of ``hidden``, and what the attention core needs.

        Returns:
            [T or T / tp, D].
        """
        if step.rotary is None and (turns := rotary_config(self.config)) is not None:
            step = dataclasses.replace(step, rotary=turns.tables(step.positions))
        first, *others = self.layers.values()
        hidden = first(hidden, embedded, step)
        for layer in others:
            hidden = layer(hidden, step)[0]
        return hidden

    def output(self, hidden: Tensor) -> ModelOutput:
        """Distributions of the tokens that follow, over the head's own tokens, from [T or T / tp, D] of ``draft``."""
        return ModelOutput(self.final_norm(hidden), self.output_layer)

    def target_ids(self, drafted: Tensor) -> Tensor:
        """Ids in the target of tokens by their numbers in the head; any shape, int64."""
        return drafted if self.vocabulary is None else self.vocabulary.token_ids.to(drafted.device)[drafted]

    def forward(self, tokens: Tensor, step: Step) -> tuple["EagleDraft", None]:
        """What a ``train_step`` calls; the objective, which has the target's states, says what is computed.

        Args:
            tokens: [T] int64.
            step: of these tokens.
        """
        return EagleDraft(self, tokens, step), None


@dataclass(frozen=True, eq=False)
class EagleDraft:
    """A head and the tokens it is to go on from; nothing is computed before it is asked for."""

    head: EagleHead
    tokens: Tensor
    """[T] int64."""
    step: Step

    def ahead(self, values: Tensor, by: int) -> Tensor:
        """[T]: for each token the value ``by`` places later in its sequence; 0 behind the end."""
        step = self.step
        if step.prefixes is not None:
            raise ValueError("behind a prefix there are several next tokens; pack sequences without prefixes for draft heads")
        lengths = (step.seq_len,) * step.batch_size if step.cu_seqlens is None else sequence_lengths(step.cu_seqlens)
        return tokens_ahead(values, lengths, self.head.groups.cp, by=by)

    def unroll(self, states: Sequence[Tensor], embed: Callable[[Tensor], Tensor], num_steps: int) -> Iterator[ModelOutput]:
        """Go on from every token at once: in pass k (from 0) the row of token t has read the tokens up to t + k + 1, those up to t
        with the target's states and the others with its own; its output is the distribution of token t + k + 2.

        Args:
            states: of the target, as of ``EagleHead.fuse``.
            embed: from token ids [T] to [T or T / tp, D].
            num_steps: passes.
        """
        hidden, rows = self.head.fuse(states), DraftRows()
        for number in range(num_steps):
            step = dataclasses.replace(self.step, positions=self.step.positions + number, rotary=None, attention=rows)
            hidden = self.head.draft(hidden, embed(self.ahead(self.tokens, number + 1)), step)
            yield self.head.output(hidden)
