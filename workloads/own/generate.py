"""Text from an own model that gives logits. It has no cache, so each token reads the whole text again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.model.generate import choose, evaluating
from workloads.model.processors import change_of
from workloads.workload import Batch, Ended, Generation, Sampling

Logits = Callable[[Batch], Tensor]


def logits_of(network: nn.Module) -> Logits | None:
    """Return the method `logits` of an own model, see `protocols.Model.logits`; None without it."""
    found: Any = getattr(network, "logits", None)
    return found if callable(found) and not isinstance(found, nn.Module) else None


def of_tokens(tokens: Tensor) -> Batch:
    """Return the batch of texts without padding, int64 [B, L], each one document."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return {"tokens": tokens, "positions": positions, "segments": torch.zeros_like(tokens)}


@torch.inference_mode()
def generate(
    name: str,
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    generation: Generation,
    sampling: Sampling,
    ended: Ended | None = None,
) -> list[list[int]]:
    """Like `workloads.model.generate.generate`, prompt by prompt, because the model need not know padding."""
    device = next(network.parameters()).device
    texts = []
    with evaluating(network):
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise WorkloadError(f"prompt {number} is empty; begin it with a token")
            change = change_of(generation, prompt, None, max_tokens, device)
            said: list[int] = []
            while len(said) < max_tokens:
                row = torch.tensor([[*prompt, *said]], device=device)
                last = next_logits(name, network, row)[:, -1]
                changed = ([change], row.tolist())
                said += choose(last, sampling, [len(said)], number, changed).tolist()
                if said[-1] in generation.ends or (ended is not None and ended(said)):
                    break
            texts.append(said)
    return texts


def next_logits(name: str, network: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of the token after each, [B, L, vocabulary], of texts int64 [B, L].

    Raises WorkloadError if the model has no logits, fails, or returns another shape.
    """
    logits = logits_of(network)
    if logits is None:
        raise WorkloadError(f"{name} gives no logits, so it cannot generate text; add logits(batch)")
    try:
        found = logits(of_tokens(tokens))
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        what = f"{name}: its logits failed on a text of {tokens.shape[1]} tokens ({reason})"
        raise WorkloadError(f"{what}; if it has no more positions, ask for fewer tokens") from None
    if found.dim() != 3 or found.shape[:2] != tokens.shape:
        raise WorkloadError(
            f"{name}: logits(batch) has shape {tuple(found.shape)}, and not [B, L, vocabulary]"
        )
    return found
