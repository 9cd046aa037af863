"""Keys that are set in a document, and nothing else in it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.document import parse_yaml
from orchestrator.config.errors import InputError
from orchestrator.config.overrides import override

ALIASES = """
evaluate:
  sets:
    one: &set {sources: [{uri: a.txt}]}
    two: *set
stages:
  - {name: first, train: &train {steps: 4, optimizer: {lr: 1.0}}}
  - {name: second, train: *train}
  - {name: third, train: {<<: *train, steps: 5}}
"""


@pytest.mark.parametrize(
    ("text", "place", "others"),
    [
        ("evaluate.sets.two.sources.0.uri=b.txt", "two", {"one": "a.txt", "two": "b.txt"}),
        ("evaluate.sets.one.sources.0.uri=b.txt", "one", {"one": "b.txt", "two": "a.txt"}),
    ],
)
def test_an_alias_of_a_set_is_changed_in_one_place(text: str, place: str, others: dict[str, str]) -> None:
    document = parse_yaml(ALIASES, "job.yaml")
    override(document, text)
    assert {name: each["sources"][0]["uri"] for name, each in document["evaluate"]["sets"].items()} == others


@pytest.mark.parametrize(
    ("stage", "rates"), [("first", [2.0, 1.0, 1.0]), ("second", [1.0, 2.0, 1.0]), ("third", [1.0, 1.0, 2.0])]
)
def test_an_alias_of_a_stage_is_changed_in_one_place(stage: str, rates: list[float]) -> None:
    document = parse_yaml(ALIASES, "job.yaml")
    override(document, f"stages.{stage}.train.optimizer.lr=2.0")
    override(document, f"stages.{stage}.seed=3")
    assert [each["train"]["optimizer"]["lr"] for each in document["stages"]] == rates
    assert [each.get("seed") for each in document["stages"]] == [3 if rate == 2.0 else None for rate in rates]


def test_what_stands_elsewhere_is_not_touched() -> None:
    shared: dict[str, Any] = {"changes": {"layers": 2}, "list": [{"a": 1}, {"a": 2}]}
    document = {"one": shared, "two": shared}
    override(document, "one.changes.layers=3")
    override(document, "one.list.1.a=5")
    override(document, "one.new.key=1")
    assert document["two"] == {"changes": {"layers": 2}, "list": [{"a": 1}, {"a": 2}]}
    assert document["one"] == {"changes": {"layers": 3}, "list": [{"a": 1}, {"a": 5}], "new": {"key": 1}}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("stages.fourth.seed=1", "there is no 'fourth'"),
        ("stages.first=1", "'first' is one of several"),
        ("stages.first.name.x.y=1", ""),
        ("=1", "is not of the form a.b=c"),
    ],
)
def test_what_cannot_be_set(text: str, wanted: str) -> None:
    document = parse_yaml(ALIASES, "job.yaml")
    if not wanted:  # a text gives way to a mapping
        override(document, text)
        assert document["stages"][0]["name"] == {"x": {"y": 1}}
        return
    with pytest.raises(InputError, match=wanted):
        override(document, text)
