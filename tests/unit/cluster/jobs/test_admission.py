"""Whose turn it is: a table of cases, and what holds in all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.jobs.admission import Admission, QueuedJob, admissions
from cluster.workers.gang import Bundle
from cluster.workers.nodes import Node

ONE = Bundle(1)
TWO_NODES = [{"CPU": 1.0}, {"CPU": 1.0}]
FULL = [{"CPU": 0.0}, {"CPU": 0.0}]


def ticket(
    name: str, priority: int = 0, since: float = 0.0, least: int = 1, most: int = 2, **more: object
) -> QueuedJob:
    return QueuedJob(f"/runs/{name}", priority, since, more.pop("bundle", ONE), least, most, **more)  # type: ignore[arg-type]


def on(*nodes: int) -> tuple[str, ...]:
    return tuple(f"n{node}" for node in nodes)


def ask(
    *tickets: QueuedJob, free: list[dict[str, float]], labels: tuple[dict[str, str], ...] = ()
) -> dict[str, Admission]:
    """The verdicts on nodes where so much is left beside what the tickets that run have there."""
    nodes = []
    for n, left in enumerate(free):
        there = [t.bundle for t in tickets for place in t.places if t.running and place == f"n{n}"]
        total = {key: value + sum(b.resources.get(key, 0.0) for b in there) for key, value in left.items()}
        nodes.append(Node(f"id{n}", f"n{n}", total, left, labels[n] if labels else {}))
    return {name.removeprefix("/runs/"): verdict for name, verdict in admissions(tickets, nodes).items()}


def test_the_first_one_goes_at_once() -> None:
    assert ask(ticket("a"), free=TWO_NODES) == {"a": Admission(True, 2)}


def test_the_higher_priority_goes_first_and_of_equals_who_waited_longer() -> None:
    found = ask(ticket("a", since=1), ticket("b", since=2), ticket("c", 5, since=3), free=TWO_NODES)
    assert [name for name, verdict in found.items() if verdict.go] == ["c"]
    assert found["a"].waits_for == "1 worker of 1 CPU; there is room for 0; running: c"
    assert found["b"].waits_for == "a comes first"


def test_nobody_overtakes_the_first_that_waits() -> None:
    busy = ticket("busy", running=True, places=on(2))
    large, small = ticket("large", since=1, least=3, most=3), ticket("small", since=2, most=1)
    found = ask(busy, large, small, free=[*TWO_NODES, {"CPU": 0.0}])
    assert (found["large"].go, found["large"].possible) == (False, True)
    assert found["small"].waits_for == "large comes first"


@pytest.mark.parametrize("priority", [0, 7])
def test_one_that_would_not_fit_an_empty_cluster_is_passed_by_all(priority: int) -> None:
    busy = ticket("busy", running=True, places=on(0), most=2)
    never = ticket("never", priority, since=1, least=3, most=3)
    found = ask(busy, never, ticket("small", since=2, most=1), free=[{"CPU": 0.0}, {"CPU": 1.0}])
    told = "3 workers of 1 CPU; all nodes together have room for 2"
    assert found["never"] == Admission(False, waits_for=told, possible=False)
    assert found["small"].go
    assert (found["busy"].yield_to, ask(busy, never, free=[{"CPU": 0.0}, {"CPU": 1.0}])["busy"].room) == (
        "",
        2,
    )


def test_it_goes_first_again_once_there_are_nodes_for_it() -> None:
    busy = ticket("busy", running=True, places=on(0))
    never, small = ticket("never", since=1, least=3, most=3), ticket("small", since=2, most=1)
    found = ask(busy, never, small, free=[{"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 1.0}])
    assert found["small"].waits_for == "never comes first"


def test_what_one_is_about_to_take_is_not_free() -> None:
    starting = ticket("a", running=True)
    assert not ask(starting, ticket("b", since=1), free=TWO_NODES)["b"].go
    half = ticket("a", running=True, places=on(0))
    assert ask(half, ticket("b", since=1), free=[{"CPU": 0.0}, {"CPU": 1.0}])["b"].go


def test_a_lower_priority_makes_room_the_lowest_and_latest_first() -> None:
    low, late = (
        ticket("low", 1, running=True, places=on(0)),
        ticket("late", 1, 9, running=True, places=on(1)),
    )
    high = ticket("high", 3, since=10)
    found = ask(low, late, high, free=FULL)
    assert (found["late"].yield_to, found["low"].yield_to) == ("high", "")
    both = ask(low, late, ticket("high", 3, since=10, least=2), free=FULL)
    assert (both["late"].yield_to, both["low"].yield_to) == ("high", "high")


@pytest.mark.parametrize("priority", [3, 4])
def test_an_equal_or_higher_one_makes_no_room(priority: int) -> None:
    found = ask(ticket("a", priority, running=True, places=on(0, 1)), ticket("b", 3, since=1), free=FULL)
    assert found["a"].yield_to == ""
    assert found["a"].go


def test_nobody_makes_room_in_vain() -> None:
    found = ask(
        ticket("a", 1, running=True, places=on(0, 1)), ticket("b", 3, since=1, least=3, most=3), free=FULL
    )
    assert found["a"].yield_to == ""


def test_nobody_grows_while_somebody_waits() -> None:
    running = ticket("a", running=True, places=on(0), most=4)
    assert ask(running, free=FULL)["a"].room == 4
    assert ask(running, ticket("b", since=1), free=FULL)["a"].room == 1


def test_gpus_count() -> None:
    bundle = Bundle(1, 1)
    found = ask(ticket("a", bundle=bundle), free=TWO_NODES)
    assert found["a"].waits_for == "1 worker of 1 CPU and 1 GPU; all nodes together have room for 0"


def test_labels_of_nodes_count() -> None:
    gold = ticket("gold", least=2, bundle=Bundle(1, labels={"metal": "gold"}))
    found = ask(gold, free=TWO_NODES, labels=({"metal": "gold"}, {}))
    assert found["gold"].waits_for == (
        "2 workers of 1 CPU and metal=gold; all nodes together have room for 1"
    )
    assert ask(gold, free=TWO_NODES, labels=({"metal": "gold"}, {"metal": "gold"}))["gold"].go


def test_who_makes_room_is_who_is_on_nodes_that_suit() -> None:
    gold = {"metal": "gold"}
    high = ticket("high", 3, since=1, bundle=Bundle(1, labels=gold))
    elsewhere = ticket("elsewhere", running=True, places=on(0))
    there = ticket("there", 1, running=True, places=on(1))
    found = ask(elsewhere, there, high, free=FULL, labels=({}, gold))
    assert (found["elsewhere"].yield_to, found["there"].yield_to) == ("", "high")
    found = ask(elsewhere, there, high, free=FULL, labels=({}, {}))
    assert (found["elsewhere"].yield_to, found["there"].yield_to) == ("", "")


def test_a_large_worker_needs_the_places_of_several_on_one_node() -> None:
    high = ticket("high", 3, since=1, bundle=Bundle(2))
    a, b = ticket("a", running=True, places=on(0)), ticket("b", 1, running=True, places=on(0))
    found = ask(a, b, high, free=[{"CPU": 0.0}])
    assert (found["a"].yield_to, found["b"].yield_to) == ("high", "high")
    apart = ticket("b", 1, running=True, places=on(1))
    found = ask(a, apart, high, free=FULL)
    assert (found["a"].yield_to, found["b"].yield_to) == ("", "")


def test_one_that_prepares_its_data_makes_room_where_it_would_have_begun() -> None:
    low = ticket("low", running=True)
    assert ask(low, ticket("high", 3, since=1, least=2), free=TWO_NODES)["low"].yield_to == "high"


def test_a_place_on_a_node_that_is_gone_is_none() -> None:
    low = ticket("low", running=True, places=on(7))
    assert ask(low, ticket("high", 3, since=1), free=FULL)["low"].yield_to == ""


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 3), st.booleans()), max_size=6),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_who_is_let_in_fits_and_the_first_in_line_is_never_passed(
    asked: list[tuple[int, int, int, bool]], free: list[int]
) -> None:
    tickets = [
        ticket(
            f"{n}",
            priority,
            since,
            least,
            least + 1,
            running=running,
            places=on(*range(least)) if running else (),
        )
        for n, (priority, since, least, running) in enumerate(asked)
    ]
    found = ask(*tickets, free=[{"CPU": float(cpus)} for cpus in free])
    waiting = sorted((t for t in tickets if not t.running), key=lambda t: (-t.priority, t.since, t.name))
    let_in = [found[t.short].go for t in waiting if found[t.short].possible]
    assert let_in == sorted(let_in, reverse=True)
    assert sum(t.least for t in waiting if found[t.short].go) <= sum(free)
    assert all(found[t.short].go for t in tickets if t.running)
    assert all(verdict.go or verdict.waits_for for verdict in found.values())
