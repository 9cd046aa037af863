"""The loss over a vocabulary against torch's own; that of a part of it is tested with real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.tensor import VocabularyLoss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_smoothed_labels_are_those_of_torch_and_the_loss_is_told_without(smoothing: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 5, 11, generator=draw), torch.randint(0, 11, (2, 5), generator=draw)
    labels[0, 2] = labels[1, 4] = -100
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found = VocabularyLoss(0, ProcessGroup((0,), 0, None), 0.0, smoothing)(ours, labels)
    found.total.backward()
    wanted = F.cross_entropy(
        theirs.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum", label_smoothing=smoothing
    )
    wanted.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    torch.testing.assert_close(found.total, plain, rtol=1e-6, atol=0)
