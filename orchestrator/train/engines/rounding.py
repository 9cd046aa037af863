"""The steps at which trained weights are rounded, see `orchestrator.quantize`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from orchestrator.quantize.config import QuantizeSpec
from workloads.model.fake_quantise import FakeQuantiser


class Rounding:
    """Switches fake quantisation on at its first step, a function of the step: a resumed run needs no state."""

    def __init__(self, models: Iterable[nn.Module], quantize: QuantizeSpec | None) -> None:
        products = {
            id(p): p for m in models for module in m.modules() if (p := getattr(module, "product", None))
        }
        self._quantisers = [module for module in products.values() if isinstance(module, FakeQuantiser)]
        self._from_step = quantize.from_step if quantize else 0
        self.at(0)

    def at(self, steps: int) -> None:
        """Round, or not, for weights that were updated `steps` times."""
        for quantiser in self._quantisers:
            quantiser.is_on = steps >= self._from_step
