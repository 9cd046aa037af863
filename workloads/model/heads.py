"""The heads on top of the last hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.config import TransformerConfig
from workloads.model.layers import activation, capped, norm
from workloads.model.mup import logit_scale


class VocabularyProjection(nn.Module):
    """Projects hidden states to vocabulary logits. When tied, it has no weight and uses the token embedding."""

    def __init__(self, config: TransformerConfig, size: int, bias: bool) -> None:
        super().__init__()
        self.scale, self.cap = logit_scale(config), config.logit_cap
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, size))
        self.bias = nn.Parameter(torch.empty(config.vocab_size)) if bias else None
        self.product: Callable[..., Tensor] = F.linear

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor | None,
        labels: Tensor | None = None,
        in_chunks: ChunkedLoss | None = None,
    ) -> Any:
        """Map [.., size] to logits [.., vocabulary], or with `in_chunks` to the sums of the loss of labels [..].

        tokens is the embedding [vocabulary, size].

        Args:
            hidden: [.., size].
            tokens: the embedding [vocabulary, size], which a tied head multiplies with; None if it has a weight of
                its own.
            labels: int64 [..]; needed with `in_chunks`.
            in_chunks: computes the loss chunk by chunk; None to return logits.
        """
        weight = tokens if self.weight is None else self.weight
        assert weight is not None
        # On the hidden states [.., size], which are far fewer numbers than the logits [.., vocabulary]: the projection
        # is linear, and the bias is not scaled.
        hidden = hidden if self.scale == 1.0 else hidden * self.scale
        if in_chunks is not None:
            assert labels is not None
            # Logits exist one chunk at a time here, so the cap goes into the loss of a chunk.
            if self.cap:
                of_tokens, cap = in_chunks.of_tokens, self.cap
                in_chunks = replace(
                    in_chunks, of_tokens=lambda x, chunk_labels: of_tokens(capped(x, cap), chunk_labels)
                )
            return in_chunks(hidden, weight, self.bias, labels)
        return capped(self.product(hidden, weight, self.bias), self.cap)


class MaskedHead(nn.Module):
    """BERT's head for masked language modelling: dense layer, activation, norm, and a vocabulary projection with a
    bias.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.embedding_size)
        self.activation = activation(config.head_activation or config.activation)
        self.norm = norm(config, config.embedding_size)
        self.output = VocabularyProjection(config, config.embedding_size, bias=True)

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor | None,
        labels: Tensor | None = None,
        in_chunks: ChunkedLoss | None = None,
    ) -> Any:
        """Map [.., hidden] to [.., vocabulary], or with `in_chunks` to sums, as `VocabularyProjection` does.

        Args:
            hidden: [.., hidden].
            tokens: as in `VocabularyProjection`.
            labels: as in `VocabularyProjection`.
            in_chunks: as in `VocabularyProjection`.
        """
        return self.output(self.norm(self.activation(self.dense(hidden))), tokens, labels, in_chunks)


class DiscriminatorHead(nn.Module):
    """ELECTRA's head: one logit per token, positive if the token was replaced (section 2)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.activation = activation(config.activation)
        self.output = nn.Linear(config.hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, L, hidden] to [B, L]."""
        return self.output(self.activation(self.dense(hidden))).squeeze(-1)


class SentenceHead(nn.Module):
    """Classifies a sequence by its first token, through BERT's pooler (dense layer and activation)."""

    def __init__(self, config: TransformerConfig, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.activation = torch.tanh if config.pooler == "tanh" else activation(config.pooler)
        self.output = nn.Linear(config.hidden, classes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, L, hidden] to [B, classes]."""
        return self.output(self.activation(self.dense(hidden[:, 0])))


ANSWER_ENDS = "answer_ends"
"""The batch entry with the position of the last token of each answer of a row, int64 [B, answers]."""


class LastTokenHead(nn.Module):
    """Classifies a sequence by its last real token, as decoders do (GPT, section 3.2)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.output = nn.Linear(config.hidden, config.classes, bias=False)

    def forward(self, hidden: Tensor, padding: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """Map [B, L, hidden] and padding bool [B, L] (True is real) to [B, classes].

        With `positions` int64 [B, n], classify the tokens at these positions instead: [B, n, classes].

        Args:
            hidden: [B, L, hidden].
            padding: bool [B, L]; None without padding.
            positions: int64 [B, n]; None for the last token.
        """
        if positions is not None:
            rows = torch.arange(len(hidden), device=hidden.device).unsqueeze(1)
            return self.output(hidden[rows, positions])
        last = hidden[:, -1]
        if padding is not None:
            # [B]: the largest index of a real token, wherever the padding is.
            end = (padding * torch.arange(hidden.shape[1], device=hidden.device)).argmax(-1)
            last = hidden[torch.arange(len(hidden), device=hidden.device), end]
        return self.output(last)


class TokenHead(nn.Module):
    """Classifies every token."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.output = nn.Linear(config.hidden, config.classes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, L, hidden] to [B, L, classes]."""
        return self.output(hidden)
