"""ELECTRA (Clark et al. 2020): a generator fills the masks, a discriminator finds what it filled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from workloads.attention import Context
from workloads.config import TransformerConfig
from workloads.embeddings import Embeddings, batch_positions
from workloads.heads import DiscriminatorHead, MaskedHead
from workloads.masks import self_mask
from workloads.transformer import make_layers, projection, run_layers
from workloads.workload import Batch


class ElectraOutput(NamedTuple):
    """generator [B, L, vocabulary] and discriminator [B, L] logits; replaced bool [B, L]."""

    generator: Tensor
    discriminator: Tensor
    replaced: Tensor


class Trunk(nn.Module):
    """One of the two networks above the shared embeddings."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.repeat = config.layers if config.shared_layers else 1
        self.projection = projection(config)
        self.layers = make_layers(config, config.layers)
        self.head = MaskedHead(config) if config.head == "masked" else DiscriminatorHead(config)

    def forward(self, vectors: Tensor, context: Context, tokens: Tensor) -> Tensor:
        """Embedded tokens [B, L, embedding_size] to the logits of the head."""
        hidden = vectors if self.projection is None else self.projection(vectors)
        hidden, _ = run_layers(self.layers, hidden, context, None, self.repeat)
        return self.head(hidden, tokens)


class Electra(nn.Module):
    """Shared embeddings (section 3.2), generator and discriminator."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.embeddings = Embeddings(config)
        self.generator = Trunk(config.generator_config())
        self.discriminator = Trunk(config)

    def forward(self, batch: Batch) -> ElectraOutput:
        """tokens (masked), targets (original) and labels (targets where masked, else -100), all [B, L];
        sample_seed int64 [B] seeds the generator's samples."""
        tokens, targets = batch["tokens"], batch["targets"]
        context = Context(self_mask(self.config, batch, tokens.shape[1]))
        logits = self.generator(self._embed(tokens, batch), context, self.tokens.weight)
        sampled = sample(logits.detach(), batch["sample_seed"])
        corrupted = torch.where(batch["labels"] != -100, sampled, targets)
        found = self.discriminator(self._embed(corrupted, batch), context, self.tokens.weight)
        return ElectraOutput(logits, found, corrupted != targets)

    def _embed(self, tokens: Tensor, batch: Batch) -> Tensor:
        positions = batch_positions(batch, tokens.shape[1], tokens.device)
        return self.embeddings(self.tokens(tokens), positions, batch.get("token_types"))


def sample(logits: Tensor, seeds: Tensor) -> Tensor:
    """A token of each position's distribution, by inversion: logits [B, L, V], seeds [B] to int64 [B, L].

    The random number of a position depends on the row's seed alone, so that a row gets the same samples
    however the batch is cut and on every device.
    """
    cumulative = logits.float().softmax(-1).cumsum(-1)
    drawn = uniform(seeds, logits.shape[1]).unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def uniform(seeds: Tensor, length: int) -> Tensor:
    """Numbers in [0, 1) for each position, from seeds int64 [B]: fp32 [B, length]."""
    steps = torch.arange(1, length + 1, device=seeds.device)
    row = _mixed(_mixed(seeds) ^ (seeds >> 32)).unsqueeze(-1)
    return (_mixed(row + 0x9E3779B9 * steps) >> 8).float() / 2**24


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit hash (Wellons, "hash-prospector": lowbias32), in int64 so that nothing overflows."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
