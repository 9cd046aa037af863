"""Divergences from a teacher: by their definitions, of stored logits, and of a vocabulary that is cut over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from workloads.objectives.distillation import (
    WHOLE,
    Shards,
    Top,
    of_hidden,
    of_logits,
    of_relations,
    of_top,
    top_of,
)

KINDS: list[Any] = ["forward", "reverse", "jensen_shannon"]


def logits(seed: int, rows: int = 5, classes: int = 12) -> Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed)) * 3


def by_definition(teacher: Tensor, student: Tensor, temperature: float, kind: str) -> Tensor:
    p, q = ((each.double() / temperature).softmax(-1) for each in (teacher, student))
    m = (p + q) / 2
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    found = {"forward": kl(p, q), "reverse": kl(q, p), "jensen_shannon": (kl(p, m) + kl(q, m)) / 2}[kind]
    return found * temperature**2


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_follow_their_definitions(kind: Any) -> None:
    found = of_logits(logits(1), logits(2), 2.0, kind)
    torch.testing.assert_close(
        found.double(), by_definition(logits(1), logits(2), 2.0, kind), rtol=1e-5, atol=1e-6
    )
    student = logits(2).requires_grad_()
    of_logits(logits(1), student, 2.0, kind).sum().backward()
    double = logits(2).double().requires_grad_()
    by_definition(logits(1), double, 2.0, kind).sum().backward()
    assert student.grad is not None
    assert double.grad is not None
    torch.testing.assert_close(student.grad.double(), double.grad, rtol=1e-4, atol=1e-6)
    assert (found > 0).all()
    assert of_logits(logits(1), logits(1), 2.0, kind).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_all_logits_stored_are_the_whole_and_fewer_are_less(kind: Any) -> None:
    teacher = logits(1)
    whole = of_logits(teacher, logits(2), 2.0, kind)
    torch.testing.assert_close(
        of_top(top_of(teacher, 12, 2.0), logits(2), 2.0, kind), whole, rtol=1e-4, atol=1e-5
    )
    before = whole
    for k in (8, 4, 1):
        found = of_top(top_of(teacher, k, 2.0), logits(2), 2.0, kind)
        assert (found <= before + 1e-5).all()
        before = found
    assert (before > 0).all()


def test_what_is_not_stored_is_one_class() -> None:
    """k = 1 of three classes, by hand: probabilities 0.7, 0.2, 0.1 and 0.5, 0.25, 0.25."""
    teacher, student = torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([[0.5, 0.25, 0.25]]).log()
    top = top_of(teacher, 1, 1.0)
    assert top.tokens.tolist() == [[0]]
    wanted = 0.7 * torch.tensor(0.7 / 0.5).log() + 0.3 * torch.tensor(0.3 / 0.5).log()
    torch.testing.assert_close(of_top(top, student, 1.0, "forward"), wanted.view(1))


@pytest.mark.parametrize("kind", KINDS)
def test_stored_logits_have_the_gradient_of_their_definition(kind: Any) -> None:
    """Autograd's, of the probabilities of three tokens and of all others together."""
    teacher, student = logits(1), logits(2).requires_grad_()
    of_top(top_of(teacher, 3, 2.0), student, 2.0, kind).sum().backward()
    double = logits(2).double().requires_grad_()
    places = teacher.topk(3).indices
    merged = []
    for each in (teacher.double(), double):
        few = (each / 2).softmax(-1).gather(-1, places)
        merged.append(2 * torch.cat((few, 1 - few.sum(-1, keepdim=True)), -1).log())
    by_definition(merged[0], merged[1], 2.0, kind).sum().backward()
    assert student.grad is not None
    assert double.grad is not None
    torch.testing.assert_close(student.grad.double(), double.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 5])
def test_a_vocabulary_that_is_cut_has_the_divergence_and_the_gradient_of_the_whole(kind: Any, k: int) -> None:
    """Two ranks in two threads, whose sums wait for each other."""
    import threading

    teacher, student = logits(1), logits(2)
    whole = student.clone().requires_grad_()
    wanted = of_top(top_of(teacher, k, 2.0), whole, 2.0, kind) if k else of_logits(teacher, whole, 2.0, kind)
    wanted.sum().backward()
    barrier, shared, found = threading.Barrier(2), [torch.zeros(())] * 2, [None, None]

    def exchange(rank: int, value: Tensor) -> list[Tensor]:
        shared[rank] = value
        barrier.wait()
        both = list(shared)
        barrier.wait()
        return both

    def run(rank: int) -> None:
        shards = Shards(
            start=(0, 7)[rank],
            total=lambda x: sum(exchange(rank, x)),
            highest=lambda x: torch.stack(exchange(rank, x)).amax(0),
        )
        part = (slice(0, 7), slice(7, 12))[rank]
        mine = student[:, part].clone().requires_grad_()
        told = (
            of_top(top_of(teacher, k, 2.0), mine, 2.0, kind, shards)
            if k
            else of_logits(teacher[:, part], mine, 2.0, kind, shards)
        )
        told.sum().backward()
        found[rank] = (told.detach(), mine.grad)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert whole.grad is not None
    for rank, part in enumerate((slice(0, 7), slice(7, 12))):
        told, gradient = found[rank]
        torch.testing.assert_close(told, wanted.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, whole.grad[:, part], rtol=1e-5, atol=1e-6)


def test_stored_numbers_are_those_of_the_softmax_at_the_temperature() -> None:
    top = top_of(logits(3), 4, 2.0)
    assert isinstance(top, Top)
    p = (logits(3) / 2).softmax(-1)
    torch.testing.assert_close((top.logits / 2 - top.log_sum.unsqueeze(-1)).exp(), p.topk(4).values)
    assert WHOLE.total(p) is p


def test_padding_counts_in_no_mean() -> None:
    """A sample of two real tokens beside one of four: each counts the same."""
    real = torch.tensor([[True, True, False, False], [True] * 4])
    teacher, student = torch.zeros(2, 4, 3), torch.ones(2, 4, 3)
    student[0, 2:] = 99.0
    assert float(of_hidden(teacher, student, real)) == pytest.approx(1.0)
    scores = torch.ones(2, 2, 4, 4)
    both = real[:, None, :, None] & real[:, None, None, :]
    found = of_relations(torch.zeros(2, 2, 4, 4), scores.where(both, 0.0), real, squared=True)
    assert float(found) == pytest.approx(2.0)  # of two heads
