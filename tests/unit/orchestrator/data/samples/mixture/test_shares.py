from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.data.config import DataSpec
from orchestrator.data.samples.mixture.interleave import MOST
from orchestrator.data.samples.mixture.mixed_order import MixedOrder
from orchestrator.data.samples.mixture.passes import check_length, course, notes
from orchestrator.data.samples.mixture.shares import Mixture, integer_shares, powers
from orchestrator.data.samples.order import Order
from orchestrator.train.config import Reading


def data(sources: list[dict[str, Any]], **keys: Any) -> DataSpec:
    named = [{"uri": f"{number}.txt", **source} for number, source in enumerate(sources)]
    return DataSpec(sources=named, tokenizer="t", sequence_length=16, **keys)  # type: ignore[arg-type]


def test_shares_are_of_tokens_and_not_of_samples() -> None:
    mixture = Mixture.of(data([{"share": 0.3}, {"share": 0.7}]), Reading(8), 10)
    assert mixture is not None
    assert mixture.weights([800, 800], [50, 50]) == [(0, [3, 7])]
    assert mixture.weights([800, 800], [50, 100]) == [(0, [3, 14])]  # of half as many tokens each
    assert mixture.size == 80


def test_thirds_are_thirds() -> None:
    mixture = Mixture.of(data([{"share": 0.333}] * 3), Reading(8), 10)
    assert mixture is not None
    assert mixture.weights([5, 5, 5], [1, 1, 1]) == [(0, [1, 1, 1])]


def test_phases_begin_at_the_positions_of_their_steps() -> None:
    phases = [
        {"until": 100, "shares": [1.0, 0.0]},
        {"until": 150, "shares": [0.5, 0.5]},
        {"shares": [0.1, 0.9]},
    ]
    mixture = Mixture.of(data([{}, {}], mixture={"phases": phases}), Reading(8), 200)
    assert mixture is not None
    assert mixture.weights([10, 10], [1, 1]) == [(0, [1, 0]), (800, [1, 1]), (1200, [1, 9])]


@pytest.mark.parametrize("given", [{"alpha": 0.5}, {"temperature": 2.0}])
def test_xlm_samples_languages_by_a_power_of_their_size(given: dict[str, float]) -> None:
    mixture = Mixture.of(data([{}, {}], mixture=given), Reading(8), 10)
    assert mixture is not None
    [(_, (large, small))] = mixture.weights([9000, 1000], [900, 100])
    assert large / small == pytest.approx(3, rel=1e-6)


def test_alpha_1_is_one_pass_over_all_and_near_0_all_come_alike() -> None:
    assert [round(p) for p in powers([70, 30], Fraction(1))] == [70, 30]
    few, many = powers([10, 10**12], Fraction(1, 10**6))
    assert many / few < 1.0001


def test_powers_are_the_same_on_every_machine() -> None:
    assert integer_shares(powers([123_456_789, 987_654, 4_321], Fraction(7, 10))) == [16212787, 552104, 12323]


@drawn(st.lists(st.fractions(0, 1), min_size=1, max_size=9).filter(any))
def test_whole_weights_are_close_and_leave_none_out(rates: list[Fraction]) -> None:
    found = integer_shares(rates)
    assert sum(found) <= MOST
    assert [weight > 0 for weight in found] == [rate > 0 for rate in rates]
    for weight, rate in zip(found, rates, strict=True):
        assert abs(Fraction(weight, sum(found)) - rate / sum(rates)) < Fraction(20, MOST)


@pytest.mark.parametrize(
    ("sources", "keys", "what"),
    [
        ([{"share": 0.5}, {}], {}, r"sources\.1 has no share"),
        ([{"share": 0.5}, {"share": 0.4}], {}, "add up to 0.9"),
        (
            [{"share": 0.5, "weight": 2.0}, {"share": 0.5}],
            {},
            r"sources\.0\.weight counts passes of an epoch",
        ),
        ([{"max_passes": 2.0}], {}, r"sources\.0\.max_passes needs a mixture"),
        ([{"share": 1.0}], {"mixture": {"alpha": 0.5}}, "leave out mixture, or the shares"),
        ([{}], {"mixture": {}}, "one of alpha, temperature and phases"),
        ([{}], {"mixture": {"alpha": 0.5, "temperature": 2.0}}, "one of alpha, temperature and phases"),
        ([{}], {"mixture": {"phases": [{"until": 3, "shares": [1.0]}]}}, "every phase but the last"),
        ([{}, {}], {"mixture": {"phases": [{"shares": [1.0]}]}}, "has 1 shares for 2 sources"),
        ([{}, {}], {"mixture": {"phases": [{"shares": [1.0, 0.0]}]}}, r"sources\.1 comes in no phase"),
        ([{}, {}], {"mixture": {"phases": [{"shares": [1.5, -0.5]}]}}, "with no share below 0"),
    ],
)
def test_what_is_no_mixture_is_refused(
    sources: list[dict[str, Any]], keys: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        data(sources, **keys)


def test_phases_out_of_order_are_refused() -> None:
    phases = [{"until": 9, "shares": [1.0]}, {"until": 9, "shares": [1.0]}, {"shares": [1.0]}]
    with pytest.raises(ValueError, match="in the order of their steps"):
        data([{}], mixture={"phases": phases})


def test_held_out_text_has_no_share() -> None:
    held_out = {"sources": [{"uri": "h.txt", "share": 0.5}]}
    with pytest.raises(ValueError, match=r"sources\.0\.share is 0\.5, but held-out text is read once"):
        data([{}], validation=held_out)


def test_the_course_of_a_run_and_what_is_read_too_often() -> None:
    found = course(MixedOrder(0, [10, 400], [(0, [1, 1])]), ["a", "b"], Reading(8), 160)
    assert found["mixture"] == [{"step": 0, "shares": [0.5, 0.5]}]
    assert [source["passes"] for source in found["sources"]] == [8.0, 0.2]
    assert notes(found) == ["source 0 (a) is read 8.0 times; beyond 4 passes repeated text teaches little"]
    assert course(Order(0, [10, 40], [1.0, 0.5]), ["a", "b"], Reading(6), 60) == {
        "epochs": 2.0,
        "sources": [
            {"uri": "a", "samples": 10, "drawn": 20, "passes": 2.0},
            {"uri": "b", "samples": 40, "drawn": 40, "passes": 1.0},
        ],
    }


def test_a_run_longer_than_its_sources_may_be_read_is_refused() -> None:
    order = MixedOrder(0, [10, 20], [(0, [1, 1])], [Fraction(2), Fraction(3)])
    check_length(order, 80)
    with pytest.raises(InputError, match="after 80 of the run's 81 samples"):
        check_length(order, 81)
