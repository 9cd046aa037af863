"""The encoder-decoder: two stacks over one vocabulary (T5, BART, Switch)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.model.attention import ALL, Context
from workloads.model.cache import Cache
from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.config import TransformerConfig
from workloads.model.dropout import sample_keys, token_keys
from workloads.model.embeddings import Embeddings, batch_positions
from workloads.model.heads import VocabularyProjection
from workloads.model.layers import embedding, norm
from workloads.model.masks import DECODER_REAL, REAL, Mask, self_mask
from workloads.model.positions import RelativeBias, rotary
from workloads.model.transformer import Output, make_layers, read_mask, relative_scores, run_layers
from workloads.workload import Batch


class Stack(nn.Module):
    """The encoder or the decoder: embeddings other than the tokens', layers and the last norm."""

    def __init__(self, config: TransformerConfig, count: int, causal: bool) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.embeddings: nn.Module | None = Embeddings(config)
        self.relative_bias = (
            RelativeBias(config, bidirectional=not causal) if config.biased_by_distance else None
        )
        self.layers = make_layers(config, count, cross=causal)
        self.norm = norm(config) if config.final_norm else None

    def embed(self, vectors: Tensor, positions: Tensor, keys: Tensor | None) -> Tensor:
        """Map token vectors [B, L, hidden] to the first hidden states. keys are as in `Context`.

        Args:
            vectors: token vectors [B, L, hidden].
            positions: int64 [1 or B, L].
            keys: dropout keys int64 [B, L]; None without dropout.
        """
        assert self.embeddings is not None
        return self.embeddings(vectors, positions, None, keys)

    def forward(
        self,
        hidden: Tensor,
        mask: Mask,
        positions: Tensor,
        extra: Tensor | None,
        keys: Tensor | None,
        real: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Mask = ALL,
        cache: Cache | None = None,
        samples: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers on hidden states [B, L, hidden]. Return the result, and the routers' extra loss.

        Args:
            hidden: [B, L, hidden].
            mask: of self-attention.
            positions: int64 [1 or B, L].
            extra: routers' losses of earlier stages; None without.
            keys: dropout keys, int64 [B, L]; None without dropout.
            real: bool [B, L], False at padding; None without padding.
            memory: output of the encoder, [B, M, hidden]; None in the encoder.
            memory_mask: of cross-attention.
            cache: of a decoder that generates.
            samples: keys of the samples, int64 [B], see `Context`.
        """
        length = hidden.shape[1]
        table = rotary(self.config, positions) if self.config.positions == "rotary" else None
        bias = None
        if self.relative_bias is not None:
            # T5: the first layer's table serves all layers of the stack, so it is read once.
            bias = relative_scores(self.relative_bias, mask, length, cache)
        context = Context(
            mask,
            table,
            bias=bias,
            memory=memory,
            memory_mask=memory_mask,
            keys=keys,
            samples=samples,
            real=real,
            cache=cache,
        )
        hidden, extra = run_layers(self.layers, hidden, context, extra)
        return (hidden if self.norm is None else self.norm(hidden)), extra

    def keep(self, start: int, stop: int) -> bool:
        """Keep layers start to stop - 1 of this stack. Return whether any are left.

        Args:
            start: first layer.
            stop: layer after the last one.
        """
        count = len(self.layers)
        for name in list(self.layers):
            if not start <= int(name) < stop:
                del self.layers[name]
        if start > 0:
            self.embeddings = None
        if stop < count:
            self.norm = None
        return bool(self.layers)


class EncoderDecoder(nn.Module):
    """The encoder-decoder: token embedding (shared by both sides), encoder, decoder and head."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens: nn.Module | None = embedding(config.vocab_size, config.hidden)
        self.encoder: Stack | None = Stack(config, config.layers, causal=False)
        self.decoder: Stack | None = Stack(config, config.decoder_layers, causal=True)
        self.head = VocabularyProjection(config, config.hidden, False) if config.head == "language" else None

    def forward(
        self,
        batch: Batch,
        hidden: Tensor | None = None,
        extra: Tensor | None = None,
        memory: Tensor | None = None,
        cache: Cache | None = None,
        in_chunks: ChunkedLoss | None = None,
    ) -> Output:
        """Map tokens and padding [B, L] and decoder_tokens [B, M] to logits [B, M, vocabulary].

        With `in_chunks`, compute the sums of the loss of labels [B, M] instead of logits. A later pipeline stage gets
        `hidden`, `extra` and `memory` from the preceding stage. With a `cache` of the tokens that the decoder has read,
        the batch has `decoder_positions` [B, M]. The encoder runs only if no memory is given.

        Args:
            batch: tokens and padding [B, L], decoder_tokens [B, M].
            hidden: of the preceding stage, [B, L or M, hidden]; None in the first one.
            extra: routers' losses of earlier stages; None without.
            memory: output of the encoder, [B, L, hidden]; None if the encoder is to run.
            cache: what the decoder has read; None in training.
            in_chunks: computes the loss chunk by chunk; None to return logits.
        """
        if self.encoder is not None and memory is None:
            hidden, extra = self._encode(self.encoder, batch, hidden, extra)
        if self.decoder is None:
            assert hidden is not None
            return Output(hidden, extra)
        if memory is None:  # the decoder begins here
            memory, hidden = hidden, None
        targets = batch["decoder_tokens"]
        steps = batch.get("decoder_positions")
        if steps is None:
            steps = torch.arange(targets.shape[1], device=targets.device).unsqueeze(0)
        mask = Mask(causal=True) if cache is None else read_mask(self.config, steps, cache)
        keys = token_keys(self, batch, targets.shape[1], 1)
        samples = sample_keys(self, batch, 1)
        if hidden is None:
            assert self.tokens is not None
            hidden = self.decoder.embed(self.tokens(targets), steps, keys)
        # [B, 1, 1, L]: cross-attention hides the padding of the source from every query [M].
        reads = Mask(batch["padding"][:, None, None, :]) if "padding" in batch else Mask()
        real = batch.get(DECODER_REAL, batch.get("decoder_padding"))
        hidden, extra = self.decoder(
            hidden,
            mask,
            steps,
            extra,
            keys,
            real=real,
            memory=memory,
            memory_mask=reads,
            cache=cache,
            samples=samples,
        )
        tied = None if self.tokens is None else self.tokens.weight
        if self.head is not None and in_chunks is not None:
            sums = self.head(hidden, tied, batch["labels"], in_chunks)
            return Output(hidden, extra, memory=memory, sums=sums)
        logits = None if self.head is None else self.head(hidden, tied)
        return Output(hidden, extra, logits, memory=memory)

    def _encode(
        self, encoder: Stack, batch: Batch, hidden: Tensor | None, extra: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        length = batch["tokens"].shape[1]
        positions = batch_positions(self.config, batch)
        keys = token_keys(self, batch, length)
        if hidden is None:
            assert self.tokens is not None
            hidden = encoder.embed(self.tokens(batch["tokens"]), positions, keys)
        mask = self_mask(self.config, batch, length)
        real = batch.get(REAL, batch.get("padding"))
        samples = sample_keys(self, batch)
        return encoder(hidden, mask, positions, extra, keys, real=real, samples=samples)

    def keep(self, start: int, stop: int, *, first: bool, last: bool) -> None:
        """Become the pipeline stage with layers start to stop - 1, counting the decoder's layers after the encoder's.

        The first stage, the stage where the decoder begins and, with a tied head, the last stage all keep `tokens`.
        Every stage of a stack keeps the stack's relative bias. The trainer sums the gradients of these copies.

        Args:
            start: first layer.
            stop: layer after the last one.
            first: whether this is the first stage.
            last: whether this is the last stage.
        """
        encoder_layers = self.config.layers
        assert self.encoder is not None
        assert self.decoder is not None
        if not self.encoder.keep(start, stop):
            self.encoder = None
        if not self.decoder.keep(max(start - encoder_layers, 0), max(stop - encoder_layers, 0)):
            self.decoder = None
        if not (first or start <= encoder_layers < stop or (last and self.config.tied)):
            self.tokens = None
        if not last:
            self.head = None
