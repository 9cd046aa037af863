"""ELECTRA (Clark et al. 2020): a generator fills masked tokens, and a discriminator detects the replaced ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from workloads.model.attention import Context
from workloads.model.config import TransformerConfig
from workloads.model.dropout import sample_keys, token_keys
from workloads.model.embeddings import Embeddings, batch_positions
from workloads.model.heads import DiscriminatorHead, MaskedHead
from workloads.model.layers import embedding
from workloads.model.masks import self_mask
from workloads.model.transformer import make_layers, projection, run_layers
from workloads.workload import IGNORED, Batch


class ElectraOutput(NamedTuple):
    """Logits of the generator [predicted, vocabulary] and of the discriminator [B, L]; replaced bool [B, L]."""

    generator: Tensor
    discriminator: Tensor
    replaced: Tensor


class Trunk(nn.Module):
    """One of the two networks on top of the shared embeddings."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.repeat = config.layers if config.shared_layers else 1
        self.projection = projection(config)
        self.layers = make_layers(config, config.layers)
        self.head = MaskedHead(config) if config.head == "masked" else DiscriminatorHead(config)

    def forward(self, vectors: Tensor, context: Context) -> Tensor:
        """Map embedded tokens [B, L, embedding_size] to hidden states [B, L, hidden].

        Args:
            vectors: embedded tokens [B, L, embedding_size].
            context: mask and dropout keys.
        """
        hidden = vectors if self.projection is None else self.projection(vectors)
        return run_layers(self.layers, hidden, context, None, self.repeat)[0]


class Electra(nn.Module):
    """Shared embeddings (section 3.2), generator and discriminator."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = embedding(config.vocab_size, config.embedding_size)
        self.embeddings = Embeddings(config)
        self.generator = Trunk(config.generator_config())
        self.discriminator = Trunk(config)

    def forward(self, batch: Batch, in_chunks: object = None) -> ElectraOutput:
        """Run generator and discriminator.

        The batch has tokens (masked), targets (original) and labels (targets where masked, else -100), all [B, L], and
        sample_seed int64 [B], which seeds the generator's samples. Sampling needs full logits of the masked tokens, so
        `in_chunks` is ignored.

        Args:
            batch: see above.
            in_chunks: ignored.
        """
        tokens = batch["tokens"]
        corrupted = batch["targets"].clone()
        masked = batch["labels"] != IGNORED
        logits = self.guess(batch, masked)
        # Detached: the discriminator's loss does not reach the generator through a sample (Clark et al., 2020, section
        # 2).
        corrupted[masked] = sample(logits.detach(), uniform(batch["sample_seed"], tokens.shape[1])[masked])
        return ElectraOutput(logits, self.judge(batch | {"tokens": corrupted}), corrupted != batch["targets"])

    def guess(self, batch: Batch, masked: Tensor | None = None) -> Tensor:
        """Return the generator's logits [B, L, vocabulary], or [predicted, vocabulary] for the positions `masked` [B,
        L].

        Args:
            batch: has the masked tokens [B, L].
            masked: bool [B, L]; None for all positions.
        """
        hidden = self._through(self.generator, batch, 0)
        return self.generator.head(hidden if masked is None else hidden[masked], self.tokens.weight)

    def judge(self, batch: Batch) -> Tensor:
        """Return the discriminator's logits [B, L] for the tokens."""
        return self.discriminator.head(self._through(self.discriminator, batch, 1))

    def _through(self, trunk: Trunk, batch: Batch, stack: int) -> Tensor:
        length = batch["tokens"].shape[1]
        keys = token_keys(self, batch, length, stack)
        samples = sample_keys(self, batch, stack)
        positions = batch_positions(self.config, batch)
        vectors = self.tokens(batch["tokens"])
        vectors = self.embeddings(vectors, positions, batch.get("token_types"), keys)
        return trunk(vectors, Context(self_mask(self.config, batch, length), keys=keys, samples=samples))


def sample(logits: Tensor, numbers: Tensor) -> Tensor:
    """Sample one token from each distribution by inversion: logits [.., V] and numbers in [0, 1) [..] to int64 [..].

    Args:
        logits: [.., V].
        numbers: in [0, 1), [..].
    """
    cumulative = logits.float().softmax(-1).cumsum(-1)
    # By rounding, the last cumulative value may differ from one.
    drawn = numbers.unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def uniform(seeds: Tensor, length: int) -> Tensor:
    """Return a number in [0, 1) for each position, from seeds int64 [B]: fp32 [B, length].

    A row's numbers depend only on its seed, so a row gets the same samples under any split of the batch and on any
    device.

    Args:
        seeds: of each row, int64 [B].
        length: numbers for each row.
    """
    steps = torch.arange(1, length + 1, device=seeds.device)
    row = _mixed(_mixed(seeds) ^ (seeds >> 32)).unsqueeze(-1)
    return (_mixed(row + 0x9E3779B9 * steps) >> 8).float() / 2**24


def _mixed(x: Tensor) -> Tensor:
    """Hash to 32 bits (Wellons, "hash-prospector": lowbias32), in int64 so that nothing overflows."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
