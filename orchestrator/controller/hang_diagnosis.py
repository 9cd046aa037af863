"""Name the ranks that the others of a hanging gang wait for, from what each rank reports. Pure, as `decide` is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.workers.gang import FINISHED, RankStatus
from cluster.workers.hang_report import Entered

NAMED = 4
"""How many missing ranks one line names; it counts the rest."""


@dataclass(frozen=True)
class Missing:
    """A rank that others wait for."""

    rank: int
    node: str
    why: str
    """What the others wait in, its own last collective and what it was doing, as text for people."""

    @property
    def where(self) -> str:
        """The rank and its node, for people."""
        return _where(self)

    @property
    def text(self) -> str:
        """One line about it."""
        return f"{self.where} is missing: {self.why}"


def missing_ranks(ranks: Sequence[RankStatus], silent: bool = False) -> list[Missing]:
    """Return the ranks that others wait for, in order; empty if the ranks were not asked, or nothing shows it.

    A rank waits if it is in a collective that another rank has not entered, or if its main thread is in a function that
    waits for others. Missing is a rank that does not wait while others do, or that is silent. If all wait, it is
    one that others wait for and that is in no collective which others have not entered. If none waits, it is one that
    has begun fewer stages than others.

    On a busy machine healthy ranks are late too: one still computes, one sends heartbeats and has not answered yet.
    They are missing only if no other rank is. Otherwise the line about the first missing rank mentions them.

    Args:
        ranks: the ranks of the gang, after they were asked by `Gang.print_stacks`.
        silent: whether only ranks without a sign of life are missing: the others may still compute.
    """
    running = [rank for rank in ranks if rank.state not in FINISHED]
    if all(rank.hang is None for rank in running):
        return []
    numbers = {rank.rank for rank in running if rank.hang is None}
    behind: dict[int, str] = {}
    if not silent:
        waits = {rank.rank: _awaited(rank, running) for rank in running}
        overdue = {rank.rank for rank in running if rank.hang and rank.hang.is_overdue}
        reports = {r.rank: r.hang for r in running if r.hang is not None and r.rank not in overdue}
        busy = {n for n, report in reports.items() if not (report.is_waiting or waits[n])}
        if len(busy) < len(reports):
            computing = {n for n in busy if reports[n].is_computing}
            numbers |= busy - computing
            numbers = numbers or computing
            numbers = numbers or {r for awaited in waits.values() for r in awaited if not waits[r]} or overdue
            behind |= dict.fromkeys(computing - numbers, "is behind too, but computes")
        elif not numbers:
            numbers = _late(running)
        behind |= dict.fromkeys(overdue - numbers, "sends heartbeats, but has not answered")
    also = [f"{_where(rank)} {behind[rank.rank]}" for rank in running if rank.rank in behind]
    missing = [rank for rank in running if rank.rank in numbers]
    return [
        Missing(rank.rank, rank.node, "; ".join([_why(rank, running), *(also[:NAMED] if not number else [])]))
        for number, rank in enumerate(missing)
    ]


def _late(running: Sequence[RankStatus]) -> set[int]:
    """Return the ranks that have begun the fewest stages, if others have begun more."""
    first = min(rank.stage.number for rank in running)
    late = {rank.rank for rank in running if rank.stage.number == first}
    return late if len(late) < len(running) else set()


def ranks_text(missing: Sequence[Missing]) -> str:
    """Return the ranks and nodes of at most NAMED missing ranks, and the number of the others."""
    names = [rank.where for rank in missing[:NAMED]]
    if more := len(missing) - len(names):
        names.append(f"{more} more")
    return " and ".join(names)


def shared_wait(ranks: Sequence[RankStatus]) -> str:
    """Return what most ranks wait in, as text for people; empty if none has reported."""
    reports = [rank.hang for rank in ranks if rank.hang is not None]
    texts = Counter(entry.text for report in reports for entry in report.entered if not entry.is_done)
    texts = texts or Counter(report.frame for report in reports if report.frame)
    return "".join(f"{_ranks(count)} in {text}" for text, count in texts.most_common(1))


def _where(rank: RankStatus | Missing) -> str:
    return f"rank {rank.rank} on {rank.node}"


def _ranks(count: int) -> str:
    return f"{count} ranks are" if count > 1 else f"{count} rank is"


def _entered(rank: RankStatus) -> tuple[Entered, ...]:
    return rank.hang.entered if rank.hang is not None else ()


def _awaited(rank: RankStatus, running: Sequence[RankStatus]) -> dict[int, Entered]:
    """Return the ranks that have not entered a collective in which `rank` is, each with that collective."""
    result: dict[int, Entered] = {}
    for entry in _entered(rank):
        for other in running:
            if not entry.is_done and other is not rank and _is_awaited(other, entry):
                result.setdefault(other.rank, entry)
    return result


def _is_awaited(other: RankStatus, entry: Entered) -> bool:
    """Whether a rank in this collective waits for the rank `other`."""
    if entry.ranks and other.rank not in entry.ranks:
        return False
    if other.hang is None or other.hang.is_overdue:
        return True
    last = _last(entry.group, [other])
    if last is None:
        return bool(entry.ranks)  # if its ranks are unknown, `other` may be none of them
    return last.number < entry.number


def _last(group: str, ranks: Sequence[RankStatus], is_done: bool = False) -> Entered | None:
    """Return the last collective of a group that one of these ranks has entered, or completed with `is_done`."""
    entries = [entry for rank in ranks for entry in _entered(rank) if entry.group == group]
    return max((e for e in entries if e.is_done or not is_done), key=lambda e: e.number, default=None)


def _newest_with(number: int, other: RankStatus) -> Entered | None:
    """Return the newest collective that `other` has completed together with rank `number`."""
    return next((e for e in reversed(_entered(other)) if e.is_done and number in e.ranks), None)


def _why(rank: RankStatus, running: Sequence[RankStatus]) -> str:
    """Return what is known about a missing rank, for people."""
    peers = [other for other in running if other is not rank]
    entries = [e for other in peers if (e := _awaited(other, running).get(rank.rank)) is not None]
    parts = []
    if entries:
        text, count = Counter(entry.text for entry in entries).most_common(1)[0]
        parts.append(f"{_ranks(count)} in {text}, and it is not")
        group = next(entry.group for entry in entries if entry.text == text)
        if rank.hang is None or rank.hang.is_overdue:
            last = _last(group, peers, is_done=True)
            parts += [f"the others last completed {last.text}"] if last else []
        else:
            last = _last(group, [rank])
            parts.append(f"its last was {last.text}" if last else "it has entered none of that group before")
    else:
        waiting = [other for other in peers if other.hang and other.hang.is_waiting]
        parts += [waits] if (waits := shared_wait(waiting)) else []
        # Messages between two ranks are not recorded, so the last collectives say how far the ranks came.
        if rank.hang is None or rank.hang.is_overdue:
            common = [last.text for other in waiting if (last := _newest_with(rank.rank, other)) is not None]
            parts += [f"the others last completed {text}" for text, _ in Counter(common).most_common(1)]
        elif entries_of_rank := _entered(rank):
            parts.append(f"its last was {entries_of_rank[-1].text}")
    frame = f" in {rank.hang.frame}" if rank.hang and rank.hang.frame else ""
    parts.append(f"it was {rank.activity}{frame}")
    if rank.hang is None:
        parts.append("it does not answer")
    elif rank.hang.is_overdue:
        parts.append("it sends heartbeats, but has not answered")
    elif rank.hang.is_computing and not rank.hang.is_waiting:
        parts.append("it computes")
    return "; ".join(parts)
