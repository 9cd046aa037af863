"""Attention masks: which tokens a token may attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.model.config import TransformerConfig
from workloads.workload import Batch

REAL = "real"
"""The batch's entry with the padding of the full sequences, if `padding` is only that of a part; what it leaves out
besides is not routed to experts."""
QUERIES = "queries"
"""The batch's entry that says which places are queries of a second stream, bool [B, L]."""
DECODER_REAL = "decoder_real"
"""The same of what a decoder reads beside an encoder."""


@dataclass(frozen=True)
class Mask:
    """allowed: bool [1 or B, 1, queries, keys], True where a query may attend to a key; None if all may.

    causal hides keys after the query as well; it is separate from `allowed` so that fused kernels need no mask tensor
    in the plain causal case.
    """

    allowed: Tensor | None = None
    causal: bool = False

    def behind(self, count: int, length: int, device: torch.device) -> Mask:
        """The mask of `length` queries whose keys stand behind `count` others, to which all may attend."""
        allowed = self.dense(length, device)
        if allowed is None:
            return self
        return Mask(F.pad(allowed.view((1,) * (4 - allowed.dim()) + allowed.shape), (count, 0), value=True))

    def with_prompt(self, count: int, length: int, device: torch.device, causal: bool) -> Mask:
        """The mask of `count` vectors before `length` tokens, who all see them; they see tokens that someone sees or,
        if it is `causal`, none."""
        if self.allowed is None:
            return self
        allowed = self.dense(length, device)
        assert allowed is not None
        allowed = allowed.view((1,) * (4 - allowed.dim()) + allowed.shape)
        below = F.pad(allowed, (count, 0), value=True)
        if allowed.shape[-2] == 1:
            return Mask(below)
        if causal:
            above = F.pad(torch.ones(count, count, dtype=torch.bool, device=device).tril(), (0, length))
        else:
            above = F.pad(allowed.any(-2, keepdim=True), (count, 0), value=True)
        return Mask(torch.cat((above.expand(*allowed.shape[:2], count, -1), below), dim=-2))

    def dense(self, length: int, device: torch.device) -> Tensor | None:
        """The full mask as one tensor, causality included; None if nothing is hidden."""
        if not self.causal:
            return self.allowed
        lower = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return lower if self.allowed is None else self.allowed & lower


def self_mask(config: TransformerConfig, batch: Batch, length: int, windowed: bool = True) -> Mask:
    """The self-attention mask of a batch.

    attention bool [B, L, L] is taken as it is (prefix models); padding bool [B, L] hides padding; segments
    int64 [B, L] hides other documents of a packed row; a window hides keys at `window` or more steps, except
    from and to the first `global_tokens` (Beltagy et al. 2020). visible bool [B, L, M] is the mask itself, of
    L positions out of a sequence of M, and visible_in_full that of layers without the window, for which `windowed` is
    False.
    """
    given = "visible" if windowed else "visible_in_full"
    if given in batch:
        return Mask(batch[given].unsqueeze(1))
    parts: list[Tensor] = []
    if "attention" in batch:
        parts.append(batch["attention"].unsqueeze(1))
    if "padding" in batch:
        parts.append(batch["padding"][:, None, None, :])
    if "segments" in batch:
        parts.append((batch["segments"][:, :, None] == batch["segments"][:, None, :]).unsqueeze(1))
    device = batch["tokens"].device
    if windowed and config.window and length > config.window:
        parts.append(_window(config, length, device))
    if not parts:
        return Mask(causal=config.causal)
    allowed = parts[0]
    for part in parts[1:]:
        allowed = allowed & part
    # A row that attends to nothing would give NaN.
    if len(parts) == 1 and "padding" in batch and not config.causal:
        allowed = allowed | ~batch["padding"].any(1)[:, None, None, None]
    elif "attention" in batch or "padding" in batch:  # padding attends to itself
        allowed = allowed | torch.eye(length, dtype=torch.bool, device=device)
    if config.positions == "relative_keys" and QUERIES in batch:  # of which there are no keys
        allowed = allowed & ~batch[QUERIES][:, None, None, :]
    causal = config.causal and "attention" not in batch
    return Mask(Mask(allowed, True).dense(length, device) if causal else allowed)


def _window(config: TransformerConfig, length: int, device: torch.device) -> Tensor:
    steps = torch.arange(length, device=device)
    near = (steps[:, None] - steps[None, :]).abs() < config.window
    everywhere = steps < config.global_tokens
    return (near | everywhere[:, None] | everywhere[None, :])[None, None]
