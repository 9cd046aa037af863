"""Who computes wrongly: in thousands of random faults under every width, and in cases by hand."""

from __future__ import annotations

import random

import pytest

from orchestrator.parallel.witness import Message
from orchestrator.train.suspects import Computed, suspects


def messages(*values: int, received: tuple[int, ...] = ()) -> list[Message]:
    return [Message(number not in received, bits=value) for number, value in enumerate(values)]


def rotated(replicas: int, passes: int, wrong: int, is_wrong: list[bool]) -> list[Computed]:
    """What `replicas` ranks compute in each pass, rank r in the role r + pass; `wrong` spoils the passes that are."""
    found = []
    for shift in range(passes):
        for rank in range(replicas):
            role = (rank + shift) % replicas
            right = [10 * role + number for number in range(4)]
            if rank == wrong and is_wrong[shift]:
                right[2:] = [1000 + 100 * shift + number for number in range(2)]
            found.append(Computed(role, rank, messages(*right)))
    return found


@pytest.mark.parametrize("replicas", [3, 4, 5, 8, 16])
def test_a_rank_that_is_always_wrong_is_named(replicas: int) -> None:
    for wrong in range(replicas):
        assert suspects(rotated(replicas, 3, wrong, [True] * 3), 0.0) == {wrong}
        assert suspects(rotated(replicas, 2, wrong, [True] * 2), 0.0) == {wrong}


def test_a_rank_that_is_wrong_now_and_then_is_named_by_a_third_computation() -> None:
    draw = random.Random(3)
    for _ in range(3000):
        replicas = draw.randrange(3, 9)
        wrong, is_wrong = draw.randrange(replicas), [draw.random() < 0.5 for _ in range(3)]
        found = suspects(rotated(replicas, 3, wrong, is_wrong), 0.0)
        assert found == ({wrong} if any(is_wrong) else frozenset())


def test_two_replicas_leave_two_suspects() -> None:
    assert suspects(rotated(2, 2, 1, [True, True]), 0.0) == {0, 1}
    assert suspects(rotated(2, 2, 1, [False, True]), 0.0) == {0, 1}
    assert suspects(rotated(2, 2, 1, [False, False]), 0.0) == frozenset()


def test_a_rank_that_received_the_error_is_not_blamed() -> None:
    """Ranks 0 and 1 share tensors, as 2 and 3 do and 4 and 5; rank 2 sends a wrong number, which rank 3 receives."""
    computed = []
    for shift in range(3):
        for replica in range(3):
            role = (replica + shift) % 3
            spoilt = 500 + shift if replica == 1 else 0
            sends = messages(role, role + spoilt, role + spoilt, received=(1,))
            computed.append(Computed(2 * role, 2 * replica, messages(role + spoilt, role, role + spoilt)))
            computed.append(Computed(2 * role + 1, 2 * replica + 1, sends))
    assert suspects(computed, 0.0) == {2}


def test_a_wrong_sum_of_right_numbers_leaves_all_who_took_part() -> None:
    computed = [
        Computed("role", rank, messages(1, 7 + (rank == 2), 3 + (rank == 2), received=(1,)))
        for rank in range(3)
    ]
    assert suspects(computed, 0.0) == {0, 1, 2}


def test_a_record_that_ends_early_differs() -> None:
    computed = [Computed(0, rank, messages(1, 2, 3)[: 2 if rank == 1 else 3]) for rank in range(3)]
    assert suspects(computed, 0.0) == {1}


def test_a_tolerance_is_a_share_of_the_norm() -> None:
    near, far = Message(True, norm=100.0, projection=1.0005), Message(True, norm=100.0, projection=1.01)
    right = Message(True, norm=100.0, projection=1.0)
    assert right.is_like(near, 1e-5)
    assert not right.is_like(far, 1e-5)
    nothing = float("nan")
    assert not right.is_like(Message(True, norm=nothing, projection=nothing), 1e-5)
    assert Message(True, norm=nothing, projection=1.0).is_like(Message(True, norm=nothing), 1e-5)
