"""Which ranks compute wrongly, by what several ranks computed of the same. Pure, so that a table of cases tests it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from orchestrator.parallel.witness import Message, Record


@dataclass(frozen=True)
class Computed:
    """What a rank computed in a role.

    Attributes:
        role: what was computed: equal roles have equal messages if no rank is wrong.
        rank: who computed it.
        record: the messages of that.
    """

    role: Hashable
    rank: int
    record: Record


def are_alike(first: Record, second: Record, tolerance: float) -> bool:
    """Whether two records have the same messages.

    Args:
        first: a record.
        second: another record.
        tolerance: see `Message.is_like`.
    """
    return len(first) == len(second) and all(
        a.is_like(b, tolerance) for a, b in zip(first, second, strict=True)
    )


def suspects(computed: Sequence[Computed], tolerance: float) -> frozenset[int]:
    """Return the ranks that compute wrongly, or if that is undecided all that may.

    In each role the first message that is not the same decides. If other ranks have sent it, the error came from them,
    and their roles decide. Otherwise the ranks that differ from the majority are wrong. Without a majority all ranks of
    the role are suspected, and a rank that is suspected in every such role is wrong.

    Args:
        computed: the records of all roles of a step.
        tolerance: see `Message.is_like`.

    Returns:
        The ranks; empty if all records are alike.
    """
    outvoted: frozenset[int] = frozenset()
    doubted: list[frozenset[int]] = []
    passive: frozenset[int] = frozenset()
    for role in dict.fromkeys(result.role for result in computed):
        same_role = [result for result in computed if result.role == role]
        groups = _first_difference(same_role, tolerance)
        if groups is None:
            continue
        ranks_of_role = frozenset(result.rank for result in same_role)
        if not groups:
            passive |= ranks_of_role
        elif 2 * len(largest := max(groups, key=len)) > len(same_role):
            outvoted |= frozenset(result.rank for result in same_role if result not in largest)
        else:
            doubted.append(ranks_of_role)
    if outvoted:
        return outvoted
    if not doubted:
        return passive
    # A rank that is suspected in each role is the only one that all differences have in common.
    return frozenset.intersection(*doubted) or frozenset.union(*doubted)


def _first_difference(results: Sequence[Computed], tolerance: float) -> list[list[Computed]] | None:
    """Return the records of a role in groups whose first message that is not equal in all of them is alike.

    Returns:
        The groups; an empty list if other ranks sent that message, None if all records are alike.
    """
    for number in range(max(len(result.record) for result in results)):
        groups: list[tuple[Message | None, list[Computed]]] = []
        for result in results:
            message = result.record[number] if number < len(result.record) else None
            matching = next((group for first, group in groups if _are_equal(first, message, tolerance)), None)
            if matching is None:
                groups.append((message, [result]))
            else:
                matching.append(result)
        if len(groups) > 1:
            was_sent = all(message is None or message.sent for message, _ in groups)
            return [group for _, group in groups] if was_sent else []
    return None


def _are_equal(first: Message | None, second: Message | None, tolerance: float) -> bool:
    return first is second if first is None or second is None else first.is_like(second, tolerance)
