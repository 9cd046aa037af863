"""Text from an own model that gives logits. It has no cache, so each token reads the whole text again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.model.generate import choose, evaluating
from workloads.model.processors import change_of
from workloads.workload import Batch, Ended, Generation, Sampling

Logits = Callable[[Batch], Tensor]
CLOSE = 1e-3
"""The largest difference between log-probabilities, relative to their range, that rounding explains."""
ROUNDING = 1e-6
"""A few units in the last place of fp32, relative to the largest logit."""
TOGETHER = 64
"""Tokens that are compared at once, which bounds the memory for large vocabularies."""
LIKELY = 1e-6
"""Less probable tokens are not compared: a model may mask them with any large number."""


def logits_of(network: nn.Module) -> Logits | None:
    """Return the method `logits` of an own model, see `protocols.Model.logits`; None without it."""
    method: Any = getattr(network, "logits", None)
    return method if callable(method) and not isinstance(method, nn.Module) else None


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
            generated: list[int] = []
            while len(generated) < max_tokens:
                row = torch.tensor([[*prompt, *generated]], device=device)
                last = next_logits(name, network, row)[:, -1]
                changed = ([change], row.tolist())
                generated += choose(last, sampling, [len(generated)], number, changed).tolist()
                if generated[-1] in generation.ends or (ended is not None and ended(generated)):
                    break
            texts.append(generated)
    return texts


def next_logits(name: str, network: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of the token after each token, [B, L, vocabulary].

    Args:
        name: the model's name in messages.
        network: the user's module.
        tokens: int64 [B, L].

    Raises:
        WorkloadError: the model has no logits, fails, or returns another shape.
    """
    logits = logits_of(network)
    if logits is None:
        raise WorkloadError(f"{name} gives no logits, so it cannot generate text; add logits(batch)")
    try:
        result = logits(of_tokens(tokens))
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        problem = f"{name}: its logits failed on a text of {tokens.shape[1]} tokens ({reason})"
        raise WorkloadError(f"{problem}; if it has no more positions, ask for fewer tokens") from None
    if result.dim() != 3 or result.shape[:2] != tokens.shape:
        raise WorkloadError(
            f"{name}: logits(batch) has shape {tuple(result.shape)}, and not [B, L, vocabulary]"
        )
    return result


def is_same_choice(name: str, ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two logits of the same tokens predict the same, up to rounding.

    Args:
        name: the model's name in messages.
        ours: logits [..., vocabulary].
        theirs: other logits of the same shape.

    Raises:
        WorkloadError: one of them predicts nothing, because of NaN or infinity.
    """
    parts = (logits.flatten(0, -2).split(TOGETHER) for logits in (ours, theirs))
    return all(_is_same(name, *pair) for pair in zip(*parts, strict=True))


def _is_same(name: str, ours: Tensor, theirs: Tensor) -> bool:
    pair = [logits.double().log_softmax(-1) for logits in (ours, theirs)]
    if any(log_p.isnan().any() for log_p in pair):
        raise WorkloadError(f"{name}: its logits are NaN, or none of a token is finite; fix it")
    least = math.log(min(LIKELY, 0.5 / ours.shape[-1]))
    likely = [log_p > least for log_p in pair]
    values = pair[0][likely[0]]
    # Logits may be so close to each other that only their own rounding is left to compare.
    rounding = ROUNDING * max(float(ours[likely[0]].abs().max()), 1.0)
    allowed = CLOSE * float(values.max() - values.min()) + rounding
    return bool(((pair[0] - pair[1])[likely[0] | likely[1]].abs() <= allowed).all())


def reads_length(name: str, bare: nn.Module, length: int) -> bool:
    """Return whether a model gives logits for texts of a length; it may need a multiple of some number.

    Also False if its code runs only on real tensors.

    Args:
        name: the model's name in messages.
        bare: the model on the meta device.
        length: number of tokens.
    """
    try:
        # The default device stays: a table that the code caches for later calls must not be on the meta device.
        with torch.no_grad(), evaluating(bare):
            next_logits(name, bare, torch.zeros((1, length), dtype=torch.int64, device="meta"))
    except WorkloadError:
        return False
    return True
