"""How gradients are scaled where they are clipped, beside torch."""

from __future__ import annotations

import pytest
import torch

from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.gradient_clipping import clip_factor


@pytest.mark.parametrize("norm", [0.5, 1.0 - 2e-6, 1.0, 1.0 + 1e-9, 3.0])
def test_gradients_at_the_bound_shrink_by_a_millionth_as_torch_has_it(norm: float) -> None:
    """1e-6 is added to the norm, so that a norm of exactly the bound is scaled too."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    weight.grad = torch.full((4,), norm / 2, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert float(weight.grad.norm()) == pytest.approx(norm * clip_factor(norm, 1.0), rel=1e-12)
    assert (clip_factor(norm, 1.0) < 1.0) == (norm >= 1.0)
    assert clip_factor(norm, None) == 1.0


@pytest.mark.slow
def test_deepspeed_clips_at_1_unless_it_is_told_and_so_does_a_job() -> None:
    """Its configuration has 0 for no clipping, and a key that is left out is no 0."""
    from deepspeed.runtime.config import get_gradient_clipping

    assert get_gradient_clipping({}) == 1.0
    assert get_gradient_clipping({"gradient_clipping": 0.0}) == 0.0
    assert OptimizerSpec().clip == 1.0
