"""Attention with sinks: the softmax with a further score, under every kind of mask."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from workloads.errors import WorkloadError
from workloads.model.kernels import attend
from workloads.model.layers import capped
from workloads.model.presets import preset

HEADS, GROUPS, LENGTH, SIZE = 4, 2, 9, 16


def defined(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float, cap: float, sinks: Tensor
) -> Tensor:
    """The definition: the sink's share of the softmax takes no value."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = capped(query @ key.transpose(-2, -1) * scale, cap).masked_fill(~allowed, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value


def below(queries: int) -> Tensor:
    """Causal, aligned at the lower right."""
    return torch.arange(LENGTH) <= torch.arange(LENGTH - queries, LENGTH)[:, None]


SOME = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.4
ALONE = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
MASKS = {
    "causal": (None, True, below(LENGTH)), "all": (None, False, ~ALONE), "some": (SOME, False, SOME),
    "none": (ALONE, False, ALONE), "last queries": (causal_lower_right(3, LENGTH), False, below(3)),
    "added": (torch.zeros(SOME.shape).masked_fill(~SOME, -torch.inf), False, SOME),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "cap"), [*((kind, 0.0) for kind in MASKS), *((kind, 0.5) for kind in ("causal", "some"))]
)
def test_a_sink_is_a_score_that_takes_no_value(kind: str, cap: float) -> None:
    allowed, causal, dense = MASKS[kind]
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).requires_grad_()

    query, sinks = drawn(2, HEADS, dense.shape[-2], SIZE), drawn(HEADS)
    key, value = drawn(2, GROUPS, LENGTH, SIZE), drawn(2, GROUPS, LENGTH, SIZE)
    given = (query, key, value, sinks)
    found = attend(query, key, value, allowed, causal, 0.3, cap, sinks)
    wanted = defined(query, key, value, dense, 0.3, cap, sinks)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    pulls = torch.randn(found.shape, generator=random)
    ours, theirs = (torch.autograd.grad((out * pulls).sum(), given) for out in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        ("t5-tiny", {"sinks": True}, "an encoder-decoder has no sinks"),
        ("deepseek-v3-tiny", {"sinks": True}, "latent attention has no qk_norm, window, score_cap or sinks"),
        ("gpt-tiny", {"swiglu_limit": 7.0}, "swiglu_limit needs gated: true and activation: silu"),
    ],
)
def test_sinks_and_clamps_that_do_not_fit_are_refused(
    model: str, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(WorkloadError, match=why):
        preset(model).changed(changes)
