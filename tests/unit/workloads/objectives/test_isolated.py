"""What a row of isolated documents computes is what the documents compute one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workloads import load
from workloads.workload import Vocabulary

LENGTH, SIZE = 24, 60


SINKS = {"vocab_size": SIZE, "max_positions": 64, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "layers": 2,
         "window": 4, "intermediate": 32, "moe": {"experts": 4, "top_k": 2, "intermediate": 32, "auxiliary": 0.0},
         "rope_scaling": {"factor": 4.0, "original_positions": 8}}  # fmt: skip


@pytest.mark.parametrize(("model", "changes"), [("gpt-tiny", {}), ("llama-tiny", {}), ("gpt-oss-20b", SINKS)])
def test_a_packed_row_has_the_loss_of_its_documents_one_by_one(model: str, changes: dict[str, Any]) -> None:
    vocabulary = Vocabulary(SIZE, eos=0)
    options = {"options": {"documents": "isolate"}, "sequence_length": LENGTH, "seed": 0, "changes": changes}
    workload = load.load(model, "causal_lm", vocabulary, **options)
    torch.manual_seed(0)
    network = workload.build()
    for name, parameter in network.named_parameters():
        parameter.data.copy_(workload.initial(name, 3))
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(1, SIZE, n), 0) for n in (6, 1, 9, 3)]

    def loss(text: np.ndarray) -> tuple[float, int, list[torch.Tensor]]:
        network.zero_grad()
        found = workload.loss(network, workload.objective.collate(lambda sample: text, [0], 0))
        found.total.backward()
        return float(found.total), int(found.count), [p.grad.clone() for p in network.parameters()]

    packed, count, gradients = loss(np.concatenate(documents))
    alone = [loss(document) for document in documents]
    assert count == sum(each[1] for each in alone) == sum(len(each) - 1 for each in documents)
    assert packed == pytest.approx(sum(each[0] for each in alone), rel=1e-5)
    for number, gradient in enumerate(gradients):
        expected = sum(each[2][number] for each in alone)
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)
