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


def are_alike(one: Record, other: Record, tolerance: float) -> bool:
    """Whether two records have the same messages."""
    return len(one) == len(other) and all(a.is_like(b, tolerance) for a, b in zip(one, other, strict=True))


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
    for role in dict.fromkeys(each.role for each in computed):
        same_role = [each for each in computed if each.role == role]
        alike = _first_difference(same_role, tolerance)
        if alike is None:
            continue
        everyone = frozenset(each.rank for each in same_role)
        if not alike:
            passive |= everyone
        elif 2 * len(largest := max(alike, key=len)) > len(same_role):
            outvoted |= frozenset(each.rank for each in same_role if each not in largest)
        else:
            doubted.append(everyone)
    if outvoted:
        return outvoted
    if not doubted:
        return passive
    return frozenset.intersection(*doubted) or frozenset.union(*doubted)


def _first_difference(own: Sequence[Computed], tolerance: float) -> list[list[Computed]] | None:
    """Return the records of a role in groups whose first message that is not equal in all of them is alike.

    Returns:
        The groups; an empty list if other ranks sent that message, None if all records are alike.
    """
    for number in range(max(len(each.record) for each in own)):
        groups: list[tuple[Message | None, list[Computed]]] = []
        for each in own:
            message = each.record[number] if number < len(each.record) else None
            found = next((group for first, group in groups if _same(first, message, tolerance)), None)
            if found is None:
                groups.append((message, [each]))
            else:
                found.append(each)
        if len(groups) > 1:
            was_sent = all(message is None or message.sent for message, _ in groups)
            return [group for _, group in groups] if was_sent else []
    return None


def _same(one: Message | None, other: Message | None, tolerance: float) -> bool:
    return one is other if one is None or other is None else one.is_like(other, tolerance)
