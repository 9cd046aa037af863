"""The transformer: one stack of layers as encoder, decoder or prefix model."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.attention import Attention, Context, LatentMultiHeadAttention
from workloads.model.cache import Cache, LayerCache
from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.config import TransformerConfig
from workloads.model.disentangled import Distances
from workloads.model.dropout import drop, keyed, noisy, sample_keys, skip, token_keys
from workloads.model.embeddings import Embeddings, batch_positions
from workloads.model.feedforward import FeedForward
from workloads.model.heads import (
    ANSWER_ENDS,
    DiscriminatorHead,
    LastTokenHead,
    MaskedHead,
    SentenceHead,
    TokenHead,
    VocabularyProjection,
)
from workloads.model.layers import embedding, norm
from workloads.model.masks import QUERIES, REAL, Mask, self_mask
from workloads.model.moe import MixtureOfExperts
from workloads.model.positions import RelativeBias, Rotary, rotary
from workloads.model.relative_keys import distances
from workloads.workload import COUNTED, IGNORED, Batch

LABEL_WEIGHTS = "label_weights"
"""The batch entry with the weight of each label in the loss, fp32 of the labels' shape."""


class Output(NamedTuple):
    """The output of a forward pass. Fields are None if the model lacks the head for them.

    hidden [B, L, hidden] is the output of the last layer or norm. extra is the routers' summed losses, an fp32 scalar.
    logits are [B, L, vocabulary], [B, L] (discriminator) or [B, L, classes] (token); a masked head that gets labels
    computes only the predicted positions, [predicted, vocabulary]. sentence is [B, classes]. memory [B, L, hidden] is
    what an encoder-decoder's decoder reads, if a later pipeline stage needs it. sums are those of a `ChunkedLoss`, and
    replace vocabulary logits. losses [B, E] are the vectors of a sample's texts, which its loss compares with those of
    others. shown is what a model shows that is compared with another, see `workloads.model.shown`.
    """

    hidden: Tensor
    extra: Tensor | None = None
    logits: Tensor | None = None
    sentence: Tensor | None = None
    memory: Tensor | None = None
    sums: tuple[Tensor, ...] | None = None
    shown: tuple[Tensor, ...] | None = None
    losses: Tensor | None = None


class Layer(nn.Module):
    """A layer: attention, cross-attention in an encoder-decoder's decoder, and feed-forward, each with a residual
    connection.
    """

    def __init__(self, config: TransformerConfig, index: int, cross: bool = False) -> None:
        super().__init__()
        self.post, self.dropout = config.norm_position == "post", config.dropout
        self.layer_drop = config.layer_drop
        self.full = bool(config.full_every) and (index + 1) % config.full_every == 0
        before = config.norm_position != "branch"
        after = config.norm_position in ("both", "branch")
        self.attention_norm = norm(config) if before else None
        self.attention_out_norm = norm(config) if after else None
        self.attention: nn.Module = (
            LatentMultiHeadAttention(config, config.latent) if config.latent else Attention(config)
        )
        self.cross_norm = norm(config) if cross else None
        self.cross_attention = Attention(config, cross=True) if cross else None
        self.feedforward_norm = norm(config) if before else None
        self.feedforward_out_norm = norm(config) if after else None
        moe = config.moe
        self.feedforward: nn.Module = (
            MixtureOfExperts(config, moe) if moe and moe.at(index) else FeedForward(config)
        )
        # Adapters of sub-layer outputs, see `workloads.adapters.adapter`.
        self.attention_adapter: nn.Module | None = None
        self.feedforward_adapter: nn.Module | None = None

    def forward(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Map [B, L, hidden] to [B, L, hidden]. Also return the router's extra loss if the layer has experts.

        Args:
            hidden: [B, L, hidden].
            context: mask, positions and keys.
        """
        output, extra = self._through(hidden, context)
        return skip(output, hidden, self.layer_drop, context.samples if self.layer_drop else None), extra

    def _through(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        # Every n-th layer sees the whole row, with the frequencies of the long range (Gemma 3).
        if self.full and context.full_mask is not None:
            context = replace(context, mask=context.full_mask, rotary=context.full_rotary or context.rotary)
        if not self.post:
            hidden = hidden + self._attend(_normed(self.attention_norm, hidden), context)
            if self.cross_attention is not None and self.cross_norm is not None:
                read = self.cross_attention(self.cross_norm(hidden), context)
                hidden = hidden + self._drop(read, context, 1)
            mixed, extra = self._feed(_normed(self.feedforward_norm, hidden), context)
            return hidden + mixed, extra
        hidden = _normed(self.attention_norm, hidden + self._attend(hidden, context))
        if self.cross_attention is not None and self.cross_norm is not None:
            read = self.cross_attention(hidden, context)
            hidden = self.cross_norm(hidden + self._drop(read, context, 1))
        mixed, extra = self._feed(hidden, context)
        return _normed(self.feedforward_norm, hidden + mixed), extra

    def _attend(self, hidden: Tensor, context: Context) -> Tensor:
        mixed = self._drop(_normed(self.attention_out_norm, self.attention(hidden, context)), context, 0)
        return mixed if self.attention_adapter is None else self.attention_adapter(mixed)

    def _feed(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.feedforward, MixtureOfExperts):
            mixed, extra = self.feedforward(hidden, context.real)
        else:
            mixed, extra = self.feedforward(hidden), None
        mixed = self._drop(_normed(self.feedforward_out_norm, mixed), context, 2)
        return mixed if self.feedforward_adapter is None else self.feedforward_adapter(mixed), extra

    def _drop(self, mixed: Tensor, context: Context, site: int) -> Tensor:
        return drop(mixed, self.dropout, context.keys, site)


def _normed(module: nn.Module | None, hidden: Tensor) -> Tensor:
    return hidden if module is None else module(hidden)


def make_layers(config: TransformerConfig, count: int, cross: bool = False) -> nn.ModuleDict:
    """Return layers keyed by their number, so that a pipeline stage keeps the original names.

    Args:
        config: the model.
        count: number of layers.
        cross: whether they have cross-attention.
    """
    count = 1 if config.shared_layers else count
    return nn.ModuleDict({str(i): Layer(config, i, cross) for i in range(count)})


def run_layers(
    layers: nn.ModuleDict, hidden: Tensor, context: Context, extra: Tensor | None, repeat: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Run all layers in order, `repeat` times if they are shared, and sum their extra losses.

    The layer number goes into the dropout keys of the context; 0 stands for the embeddings.

    Args:
        layers: by number.
        hidden: [B, L, hidden].
        context: what all layers share.
        extra: routers' losses of earlier stages; None without.
        repeat: how often shared layers run.
    """
    for pass_number in range(repeat):
        for name, layer in layers.items():
            number = 1 + pass_number + int(name)
            keys = None if context.keys is None else keyed(context.keys, number)
            samples = None if context.samples is None else keyed(context.samples, number)
            layer_cache = None
            if context.cache is not None:
                layer_cache = context.cache.layers.setdefault((pass_number, name), LayerCache())
            hidden, more = layer(
                hidden, replace(context, keys=keys, score_keys=keys, samples=samples, layer_cache=layer_cache)
            )
            if more is not None:
                extra = more if extra is None else extra + more
    return hidden, extra


class Transformer(nn.Module):
    """One stack: tokens, embeddings, layers, norm and head.

    After `keep`, the module is a pipeline stage, and the parts that it lacks are None.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens: nn.Module | None = embedding(config.vocab_size, config.embedding_size)
        self.embeddings: nn.Module | None = Embeddings(config)
        self.projection = projection(config)
        self.relative_bias = (
            RelativeBias(config, bidirectional=not config.causal) if config.biased_by_distance else None
        )
        self.distances = Distances(config) if config.disentangled else None
        self.layers = make_layers(config, config.layers)
        self.norm = norm(config) if config.final_norm else None
        self.head = make_head(config)
        self.sentence_head = SentenceHead(config, 2) if config.sentence_head else None
        self.prefix_length = 0  # number of an adapter's positions before the tokens
        # An adapter's vectors before those of the tokens, see `workloads.adapters.prompt`.
        self.prompt: nn.Module | None = None
        self.prompt_length = 0
        # Pools texts that are compared, see `workloads.model.text_pooling`.
        self.text_pooling: nn.Module | None = None
        self.last = True

    def forward(
        self,
        batch: Batch,
        hidden: Tensor | None = None,
        extra: Tensor | None = None,
        cache: Cache | None = None,
        in_chunks: ChunkedLoss | None = None,
    ) -> Output:
        """Return the output for `batch`. A later pipeline stage gets `hidden` and `extra` from the preceding stage.

        With `in_chunks`, a vocabulary head computes the loss of the batch's labels instead of logits. A `cache` holds
        the keys and values of tokens at lower positions; the batch then has `positions` [B, L], and the output covers
        only each row's last token.

        Args:
            batch: has `tokens` [B, L], and what the model and its head read besides.
            hidden: of the preceding stage, [B, L, hidden]; None in the first one.
            extra: routers' losses of earlier stages; None without.
            cache: what a generating model has read; None in training.
            in_chunks: computes the loss chunk by chunk; None to return logits.
        """
        pools = self.text_pooling is not None and COUNTED in batch
        if pools:
            batch = self.text_pooling.apart(batch)  # type: ignore[union-attr, operator]
        positions, before = self._positions(batch, cache)
        context = self._context(batch, positions, cache, before)
        if hidden is None:
            assert self.tokens is not None
            assert self.embeddings is not None
            vectors = noisy(self, self.tokens(batch["tokens"]), batch)
            types = batch.get("token_types")
            tasks = batch.get("task_types")
            if before:
                assert self.prompt is not None
                vectors = self.prompt(vectors)
                types, tasks = (None if kind is None else F.pad(kind, (before, 0)) for kind in (types, tasks))
            embedded_positions = positions + self.prefix_length
            queries = batch.get(QUERIES)
            hidden = self.embeddings(
                vectors, embedded_positions, types, context.keys, task_types=tasks, queries=queries
            )
            hidden = hidden if self.projection is None else self.projection(hidden)
        repeat = self.config.layers if self.config.shared_layers else 1
        hidden, extra = run_layers(self.layers, hidden, context, extra, repeat)
        # The prompt's vectors travel to the last stage with the tokens, and no head reads them.
        hidden = hidden[:, before:] if before and self.last else hidden
        if cache is not None:
            # Before norm and head: logits over the vocabulary of a whole prompt would be computed for nothing.
            hidden = _last(hidden, batch.get("padding"))
        hidden = hidden if self.norm is None else self.norm(hidden)
        if pools:
            assert self.text_pooling is not None
            return Output(hidden, extra, losses=self.text_pooling(hidden, batch["padding"]))
        sentence = None if self.sentence_head is None else self.sentence_head(hidden)
        return self._headed(Output(hidden, extra, sentence=sentence), batch, in_chunks)

    def _positions(self, batch: Batch, cache: Cache | None) -> tuple[Tensor, int]:
        """Return the positions [1 or B, L] of a forward pass, and how many of the first ones belong to the prompt."""
        positions = batch_positions(self.config, batch)
        if not self.prompt_length:
            return positions, 0
        positions = positions + self.prompt_length
        if cache is not None and cache.length:
            return positions, 0
        first = torch.arange(self.prompt_length, device=positions.device).expand(len(positions), -1)
        return torch.cat((first, positions), dim=1), self.prompt_length

    def _context(
        self, batch: Batch, positions: Tensor, cache: Cache | None = None, before: int = 0
    ) -> Context:
        length, device = batch["tokens"].shape[1], batch["tokens"].device
        full: Mask | None = None
        if cache is None:
            mask = self_mask(self.config, batch, length)
            mask = mask.with_prompt(before, length, device, self.config.causal) if before else mask
            full = self_mask(self.config, batch, length, windowed=False) if self.config.full_every else None
        else:
            cache.slots += before
            mask = read_mask(self.config, positions, cache)
            full = Mask(cache.visible(self.config, windowed=False)) if self.config.full_every else None
        table: Rotary | None = None
        far: Rotary | None = None
        if self.config.positions == "rotary":
            table = rotary(self.config, positions + self.prefix_length, windowed=True)
        if self.config.window_theta:
            far = rotary(self.config, positions + self.prefix_length)
        bias = None
        if self.relative_bias is not None:
            bias = relative_scores(self.relative_bias, mask, length, cache, batch.get("positions"))
        if self.prefix_length:
            mask = mask.behind(self.prefix_length, length, batch["tokens"].device)
        keys = token_keys(self, batch, before + length)
        real = batch.get(REAL, batch.get("padding"))
        real = F.pad(real, (before, 0), value=True) if real is not None and before else real
        samples = sample_keys(self, batch)
        masks = Context(mask, table, bias, full_mask=full, full_rotary=far)
        if self.config.positions == "relative_keys":
            types = batch.get("token_types")
            masks = replace(masks, between=distances(positions, length, self.config.hidden, types))
        if self.distances is not None:
            token_positions = batch.get("positions")
            if token_positions is None:
                token_positions = torch.arange(length, device=device).unsqueeze(0)
            masks = replace(masks, between=self.distances(token_positions))
        return replace(masks, keys=keys, samples=samples, real=real, cache=cache)

    def _headed(self, output: Output, batch: Batch, in_chunks: ChunkedLoss | None) -> Output:
        hidden = output.hidden
        if isinstance(self.head, VocabularyProjection | MaskedHead):
            tokens = None if self.tokens is None else self.tokens.weight
            labels = batch.get("labels")
            if labels is not None and self.config.architecture == "encoder":
                # [predicted, hidden]: BERT predicts 15 % of the tokens, and the projection to the vocabulary skips the
                # others.
                predicted = labels != IGNORED
                hidden = hidden[predicted]
                labels = labels[predicted]
            if in_chunks is not None:
                return output._replace(sums=self.head(hidden, tokens, labels, in_chunks))
            return output._replace(logits=self.head(hidden, tokens))
        if isinstance(self.head, DiscriminatorHead | TokenHead):
            return output._replace(logits=self.head(hidden))
        if isinstance(self.head, LastTokenHead):
            return output._replace(sentence=self.head(hidden, batch.get("padding"), batch.get(ANSWER_ENDS)))
        return output if self.head is None else output._replace(sentence=self.head(hidden))

    def tables_read_once(self) -> list[nn.Embedding]:
        """Return the table of tokens if a forward pass reads it once: no head reads it again."""
        table = self.tokens
        is_tied = self.config.tied and isinstance(self.head, VocabularyProjection | MaskedHead)
        if is_tied or type(table) is not nn.Embedding:
            return []
        return [] if table.sparse or table.padding_idx is not None else [table]

    def keep(self, start: int, stop: int, *, first: bool, last: bool) -> None:
        """Become the pipeline stage with layers start to stop - 1; the first and the last stage may have none.

        Only the first stage has the embeddings, and only the last one has norm and head. With a tied head, the last
        stage keeps `tokens` too, and the trainer sums both gradients.

        Args:
            start: first layer.
            stop: layer after the last one.
            first: whether this is the first stage.
            last: whether this is the last stage.
        """
        self.last = last
        for name in list(self.layers):
            if not start <= int(name) < stop:
                del self.layers[name]
        if not self.layers:
            self.relative_bias = self.distances = None
        if not first:
            self.embeddings = self.projection = self.prompt = None
            if not (last and self.config.tied):
                self.tokens = None
        if not last:
            self.norm = self.head = self.sentence_head = None


def _last(hidden: Tensor, padding: Tensor | None) -> Tensor:
    """Return the hidden states [B, 1, hidden] of each row's last real token."""
    if padding is None:
        return hidden[:, -1:]
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, padding.sum(1) - 1].unsqueeze(1)


def projection(config: TransformerConfig) -> nn.Linear | None:
    """Return the map from a factorised embedding to the hidden size (ALBERT, section 3.1)."""
    if config.embedding_size == config.hidden:
        return None
    return nn.Linear(config.embedding_size, config.hidden)


def make_head(config: TransformerConfig) -> nn.Module | None:
    """Return the configured head; None without one."""
    if config.head == "language":
        return VocabularyProjection(config, config.hidden, config.head_bias)
    if config.head == "sequence":
        return LastTokenHead(config) if config.causal else SentenceHead(config, config.classes)
    heads = {"masked": MaskedHead, "discriminator": DiscriminatorHead, "token": TokenHead, "span": TokenHead}
    return heads[config.head](config) if config.head in heads else None


def read_mask(config: TransformerConfig, positions: Tensor, cache: Cache) -> Mask:
    """Return the mask of a forward pass over tokens at `positions` [B, L], over all tokens in the cache.

    Args:
        config: the model.
        positions: int64 [B, L].
        cache: what the model has read; advanced to these positions.
    """
    cache.advance(positions)
    return Mask(cache.visible(config))


def relative_scores(
    module: nn.Module, mask: Mask, length: int, cache: Cache | None, positions: Tensor | None = None
) -> Tensor:
    """Return additive scores of `length` tokens by distance, with -inf where attention is not allowed.

    `positions` [1 or B, L] gives the positions of tokens that are not in order.

    Args:
        module: the bias of the stack.
        mask: which keys a query sees.
        length: tokens of the row.
        cache: what a generating model has read; None in training.
        positions: of tokens that are not in order; None for 0, 1, ..
    """
    assert isinstance(module, RelativeBias)
    if cache is not None:
        bias, allowed = module.between(cache.positions, cache.length), mask.allowed
    else:
        bias = module(length) if positions is None else module.apart(positions)
        allowed = mask.dense(length, module.weight.device)
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
