"""A device that computes wrongly, for tests: one bit of a result is flipped again and again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.parallel import burn_in


class Flaw:
    """Flips one bit of one number in every product of a layer, in its gradient, or in every optimizer update."""

    def __init__(self, kind: str, seed: int, bit: int | None = None) -> None:
        """
        Args:
            kind: what is wrong: product, gradient or update.
            seed: chooses the layer, the number and the bit.
            bit: the bit, counted from the lowest of 32; None to let the seed choose among the upper ones.
        """
        self.kind = kind
        draw = torch.Generator().manual_seed(seed)
        self._draw = int(torch.randint(2**31, (1,), generator=draw))
        self._bit = bit if bit is not None else int(torch.randint(20, 27, (1,), generator=draw))

    def install(self, stages: Iterable[nn.Module]) -> None:
        """Make a linear layer wrong from now on, unless the flaw is in updates."""
        layers = [module for stage in stages for module in stage.modules() if isinstance(module, nn.Linear)]
        if self.kind != "update" and layers:
            layers[self._draw % len(layers)].register_forward_hook(self._after)

    def _after(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        if self.kind == "product":
            return output + (self.bend(output) - output).detach()
        if output.requires_grad:
            output.register_hook(self.bend)
        return output

    @torch.no_grad()
    def bend(self, result: Tensor) -> Tensor:
        """Return a copy of a result with one bit of one number flipped."""
        bent = result.detach().float().contiguous().clone()
        words = bent.view(-1).view(torch.int32)
        number = self._draw % len(words)
        words[number] ^= 1 << self._bit
        return bent.to(result.dtype)

    @torch.no_grad()
    def bend_updates(self, parameters: Iterable[Tensor]) -> None:
        """Flip the bit in each updated parameter, in place, if the flaw is in updates."""
        for parameter in parameters:
            if self.kind == "update" and parameter.numel():
                parameter.copy_(self.bend(parameter))


def arithmetic_errors(device: torch.device, seed: int, flaw: Flaw | None) -> list[str]:
    """Return a line for each test of a device's arithmetic with a wrong result.

    Args:
        device: where to compute.
        seed: of the numbers.
        flaw: an injected fault, which the tests must find; None without.
    """
    bend = {flaw.kind: flaw.bend} if flaw is not None else {}
    product = bend.get("product") or bend.get("gradient") or burn_in.unchanged
    return [
        *burn_in.products(device, seed, product),
        *burn_in.updates(device, seed, bend.get("update", burn_in.unchanged)),
    ]
