"""The loss in chunks of tokens against all logits at once: every kind of head, its gradients, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.tensor import VocabularyLoss
from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.heads import VocabularyProjection
from workloads.model.losses import loss
from workloads.model.presets import preset
from workloads.transformer_workload import build_model
from workloads.workload import Batch, Loss

SIZES = {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 2, "vocab_size": 97}
LENGTH = 12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("gpt-tiny", {}),
    "plain": ("llama-tiny", {"tied": False}),
    "masked with a bias": ("bert-tiny", {"sentence_head": False}),
    "pair, scaled": ("t5-tiny", {"tied": True, "scaled_head": True}),
    "experts": ("mixtral-tiny", {}),
}


def of_tokens(z: float, correct: bool) -> Callable[[Tensor, Tensor], Loss]:
    found = VocabularyLoss(97, ProcessGroup((0,), 0, None), z)
    found.counts_correct = correct
    return found


def batch_of(pair: bool) -> Batch:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 97, (3, LENGTH), generator=draw)
    labels[:, ::3] = -100
    tokens = torch.randint(0, 97, (3, LENGTH), generator=draw)
    return {"tokens": tokens, "labels": labels} | ({"decoder_tokens": tokens.flip(1)} if pair else {})


def step(
    name: str, at_once: int | None, z: float = 0.0, bf16: bool = False, leaves_out: bool = False
) -> tuple[Loss, dict[str, Tensor]]:
    """The loss and its gradients, with logits of `at_once` tokens or of all."""
    model, changes = MODELS[name]
    config = preset(model).changed({**SIZES, **changes})
    torch.manual_seed(0)
    network = build_model(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch, read = batch_of(config.architecture == "encoder-decoder"), of_tokens(z, True)
    how = None if at_once is None else ChunkedLoss(read, at_once, lambda total: total / 24.0, leaves_out)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = loss(config, network(batch, in_chunks=how), batch, read)
    (found.total / 24.0 + (0.0 if found.extra is None else found.extra)).backward()
    return found, {n: p.grad for n, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("z", [0.0, 0.01])
@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_has_the_bits_of_whole_logits(name: str, z: float) -> None:
    (whole, wanted), (found, gradients) = step(name, None, z), step(name, 999, z)
    assert torch.equal(found.total, whole.total)
    assert torch.equal(found.count, whole.count)
    assert torch.equal(found.correct, whole.correct)
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_several_chunks_differ_by_the_order_of_sums(name: str, leaves_out: bool) -> None:
    (whole, wanted), (found, gradients) = step(name, None, 0.01), step(name, 5, 0.01, leaves_out=leaves_out)
    assert torch.equal(found.count, whole.count)
    torch.testing.assert_close(found.total, whole.total, rtol=1e-6, atol=0)
    assert torch.equal(found.correct, whole.correct)
    for each, gradient in wanted.items():
        torch.testing.assert_close(
            gradients[each], gradient, rtol=0, atol=1e-6 * max(float(gradient.abs().max()), 0.1)
        )


@pytest.mark.parametrize("at_once", [999, 5])
def test_half_precision_rounds_as_whole_logits_do(at_once: int) -> None:
    (whole, wanted), (found, gradients) = step("tied", None, bf16=True), step("tied", at_once, bf16=True)
    torch.testing.assert_close(found.total, whole.total, rtol=1e-6, atol=0)
    for each, gradient in wanted.items():
        assert gradients[each].dtype is torch.float32
        exact = 0.0 if at_once > LENGTH * 3 else 2**-8 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[each], gradient, rtol=0, atol=exact)


def head(tied: bool = False) -> tuple[VocabularyProjection, Tensor, Tensor]:
    made = VocabularyProjection(preset("gpt-tiny").changed({**SIZES, "tied": tied}), 32, bias=True)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made, torch.randn(2, LENGTH, 32).requires_grad_(), torch.randint(0, 97, (2, LENGTH))


def test_tokens_without_a_label_have_no_logits() -> None:
    made, hidden, labels = head()
    labels[:, 5:] = -100
    rows = []

    def read(logits: Tensor, wanted: Tensor) -> Loss:
        rows.append(logits.shape[1])
        return of_tokens(0.0, False)(logits, wanted)

    total, count = made(hidden, None, labels, ChunkedLoss(read, 4, leaves_out=True))
    total.backward()
    assert (rows, int(count)) == ([4, 4, 2], 10)
    assert hidden.grad is not None
    assert (hidden.grad[:, 5:] == 0).all()
    assert (hidden.grad[:, :5] != 0).any(-1).all()


def test_no_label_at_all_is_a_loss_of_zero() -> None:
    made, hidden, labels = head()
    total, count = made(
        hidden, None, torch.full_like(labels, -100), ChunkedLoss(of_tokens(0.0, False), 4, leaves_out=True)
    )
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0.0)
    assert all((parameter.grad == 0).all() for parameter in (hidden, *made.parameters()))


def test_a_frozen_weight_has_no_gradient() -> None:
    made, hidden, labels = head()
    made.weight.requires_grad_(False)
    total, _ = made(hidden, None, labels, ChunkedLoss(of_tokens(0.0, False), 5))
    total.backward()
    assert made.weight.grad is None
    assert made.bias.grad is not None
    assert hidden.grad is not None


def test_an_evaluation_computes_no_gradients() -> None:
    made, hidden, labels = head()
    with torch.no_grad():
        total, count, correct = made(hidden, None, labels, ChunkedLoss(of_tokens(0.0, True), 5))
        whole = of_tokens(0.0, True)(made(hidden, None), labels)
    assert not total.requires_grad
    torch.testing.assert_close(total, whole.total, rtol=1e-6, atol=0)
    assert (count, correct) == (whole.count, whole.correct)


def test_a_sum_that_is_weighed_otherwise_has_its_own_gradient() -> None:
    made, hidden, labels = head()
    total, _ = made(hidden, None, labels, ChunkedLoss(of_tokens(0.0, False), 5))
    (3.0 * total).backward()
    tripled = made.weight.grad.clone()
    made.weight.grad = None
    of_tokens(0.0, False)(made(hidden, None), labels).total.backward()
    torch.testing.assert_close(tripled, 3.0 * made.weight.grad, rtol=0, atol=2e-5)


def test_nothing_to_predict_is_no_nan() -> None:
    made, _, _ = head()
    hidden, labels = torch.empty(0, 32).requires_grad_(), torch.empty(0, dtype=torch.int64)
    total, count = made(hidden, None, labels, ChunkedLoss(of_tokens(0.0, False), 5))
    total.backward()
    assert (total, count) == (0, 0)
    assert torch.equal(made.weight.grad, torch.zeros_like(made.weight))


def test_no_tensor_has_more_logits_than_a_chunk() -> None:
    made, hidden, labels = head()
    read, seen = of_tokens(0.0, False), []

    def watched(logits: Tensor, labels: Tensor) -> Loss:
        seen.append(logits.numel())
        return read(logits, labels)

    total, _ = made(hidden, None, labels, ChunkedLoss(watched, 5))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        made(hidden, None, labels, ChunkedLoss(read, 5))
    total.backward()
    assert max(seen) == 5 * 97
    assert all(size <= 97 * 32 for size in kept)
