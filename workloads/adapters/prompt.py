"""Learned vectors before the tokens, at the input only.

Prompt tuning (Lester et al., 2021, section 2), and P-tuning (Liu et al., 2021, "GPT Understands, Too", section 3.2),
which computes the vectors by a small network.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.model.config import TransformerConfig
from workloads.model.transformer import Transformer


class Prompt(nn.Module):
    """`count` vectors of the token embedding's size. With `network`, three linear layers transform them."""

    def __init__(self, count: int, size: int, network: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))
        self.first, self.second, self.last = (nn.Linear(size, size) if network else None for _ in range(3))

    def forward(self, vectors: Tensor) -> Tensor:
        """Prepend the prompt to token vectors: [B, L, size] to [B, count + L, size]."""
        learned = self.vectors().to(vectors.dtype)
        return torch.cat((learned.expand(len(vectors), -1, -1), vectors), dim=1)

    def vectors(self) -> Tensor:
        """Return the vectors of the prompt, [count, size]."""
        if self.first is None or self.second is None or self.last is None:
            return self.weight
        inner: Tensor = self.second(F.relu(self.first(self.weight)))
        vectors: Tensor = self.last(F.relu(inner))
        return vectors


def add_prompt(model: nn.Module, config: TransformerConfig, count: int, network: bool) -> None:
    """Add a prompt to a model. Raises WorkloadError if the model does not support prompts."""
    for reason, wrong in (
        ("it has two stacks", config.architecture == "encoder-decoder" or bool(config.generator)),
        ("its attention has a window", bool(config.window)),
        ("its positions are not absolute", config.positions not in ("learned", "rotary", "sinusoidal")),
        ("its scores depend on distances", config.biased_by_distance or bool(config.disentangled)),
        ("it has block positions", config.block_positions),
    ):
        if wrong:
            raise WorkloadError(f"this model can have no prompt: {reason}; use lora")
    assert isinstance(model, Transformer)
    model.prompt, model.prompt_length = Prompt(count, config.embedding_size, network), count


@torch.no_grad()
def prompt_vectors(read: Callable[[str], Tensor], network: bool) -> Tensor:
    """Return the vectors [count, size] of a trained prompt. `read` returns its tensors by their names in the model."""
    count, size = read("prompt.weight").shape
    made = Prompt(count, size, network)
    for name, parameter in made.named_parameters():
        parameter.copy_(read(f"prompt.{name}"))
    return made.vectors()
