"""The encoder-decoder: two stacks over one vocabulary (T5, BART, Switch)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.attention import Context
from workloads.config import TransformerConfig
from workloads.embeddings import Embeddings, batch_positions
from workloads.heads import VocabularyProjection
from workloads.layers import embedding, norm
from workloads.masks import Mask, self_mask
from workloads.positions import RelativeBias, rotary
from workloads.transformer import Output, make_layers, masked_bias, run_layers
from workloads.workload import Batch


class Stack(nn.Module):
    """Embeddings beyond the tokens, layers and the last norm of one side."""

    def __init__(self, config: TransformerConfig, count: int, causal: bool) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.embeddings = Embeddings(config)
        self.relative_bias = (
            RelativeBias(config, bidirectional=not causal) if config.positions == "relative" else None
        )
        self.layers = make_layers(config, count, cross=causal)
        self.norm = norm(config) if config.final_norm else None

    def forward(
        self, vectors: Tensor, mask: Mask, positions: Tensor, memory: Tensor | None, memory_mask: Mask
    ) -> tuple[Tensor, Tensor | None]:
        """Token vectors [B, L, hidden] to hidden states [B, L, hidden] and the routers' extra loss."""
        length = vectors.shape[1]
        table = rotary(self.config, positions) if self.config.positions == "rotary" else None
        bias = None
        if self.relative_bias is not None:
            bias = masked_bias(self.relative_bias(length), mask.dense(length, vectors.device))
        context = Context(mask, table, bias, memory, memory_mask)
        hidden = self.embeddings(vectors, positions, None)
        hidden, extra = run_layers(self.layers, hidden, context, None)
        return (hidden if self.norm is None else self.norm(hidden)), extra


class EncoderDecoder(nn.Module):
    """tokens (shared by both sides), encoder, decoder and head."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = embedding(config.vocab_size, config.hidden)
        self.encoder = Stack(config, config.layers, causal=False)
        self.decoder = Stack(config, config.decoder_layers, causal=True)
        self.head = VocabularyProjection(config, config.hidden, False) if config.head == "language" else None

    def forward(self, batch: Batch) -> Output:
        """tokens and padding [B, L] and decoder_tokens [B, M] to logits [B, M, vocabulary]."""
        tokens, targets = batch["tokens"], batch["decoder_tokens"]
        mask = self_mask(self.config, batch, tokens.shape[1])
        positions = batch_positions(batch, tokens.shape[1], tokens.device)
        memory, extra = self.encoder(self.tokens(tokens), mask, positions, None, Mask())
        reads = Mask(batch["padding"][:, None, None, :]) if "padding" in batch else Mask()
        steps = torch.arange(targets.shape[1], device=targets.device).unsqueeze(0)
        hidden, more = self.decoder(self.tokens(targets), Mask(causal=True), steps, memory, reads)
        if extra is not None and more is not None:
            extra = extra + more
        logits = None if self.head is None else self.head(hidden, self.tokens.weight)
        return Output(hidden, extra if extra is not None else more, logits)
