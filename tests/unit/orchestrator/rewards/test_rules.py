"""The built-in rewards, by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.rules import NoAnswer, Refused, rule_of


def value(text: str, columns: dict[str, Any] | None = None, tokens: int = 0, **reward: Any) -> float:
    rule = rule_of(RewardSpec(**reward).rule)
    return rule({"text": text, "columns": columns or {}, "tokens": tokens})


@pytest.mark.parametrize(
    ("text", "right", "options", "reward"),
    [
        ("42", "42", {}, 1.0),
        (" 42\n", "42", {}, 1.0),
        (" 42", "42", {"strip": False}, 0.0),
        ("42.", "42", {}, 0.0),
        ("42", 42, {}, 1.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("c", ["a", "b"], {}, 0.0),
        ("so 1, then the answer is 42", "42", {"pattern": r"answer is (\d+)"}, 1.0),
        ("answer is 1, no, answer is 2", "2", {"pattern": r"answer is (\d+)"}, 1.0),
        ("answer is 1, no, answer is 2", "1", {"pattern": r"answer is (\d+)"}, 0.0),
        ("no idea", "42", {"pattern": r"answer is (\d+)"}, 0.0),
        ("Answer is YES", "yes", {"pattern": r"answer is (\w+)"}, 0.0),
        ("Answer is YES", "yes", {"pattern": r"answer is (\w+)", "ignore_case": True}, 1.0),
    ],
)
def test_exact_match(text: str, right: Any, options: dict[str, Any], reward: float) -> None:
    assert value(text, {"answer": right}, kind="exact_match", **options) == reward


def test_another_column() -> None:
    assert value("a", {"answer": "b", "label": "a"}, kind="exact_match", column="label") == 1.0
    with pytest.raises(Refused, match="no column label"):
        value("a", {"answer": "b"}, kind="exact_match", column="label")
    with pytest.raises(NoAnswer, match="column answer is empty"):
        value("a", {"answer": None}, kind="exact_match")


def test_regex() -> None:
    assert value("a <think>b</think> c", kind="regex", pattern="<think>.*</think>") == 1.0
    assert value("THE END", kind="regex", pattern="the end$") == 0.0
    assert value("THE END", kind="regex", pattern="the end$", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("tokens", "wanted", "reward"),
    [
        (10, {"most": 10}, 1.0),
        (11, {"most": 10}, 0.0),
        (9, {"least": 10}, 0.0),
        (10**6, {"least": 10}, 1.0),
        (12, {"most": 10, "margin": 8}, 0.75),
        (18, {"most": 10, "margin": 8}, 0.0),
        (30, {"most": 10, "margin": 8}, 0.0),
        (7, {"least": 8, "most": 10, "margin": 2}, 0.5),
    ],
)
def test_length(tokens: int, wanted: dict[str, int], reward: float) -> None:
    assert value("", tokens=tokens, kind="length", length=wanted) == reward


@pytest.mark.parametrize(
    ("text", "right", "options", "reward"),
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", {}, 1.0),
        ("so \\boxed{\\frac{2}{4}}", "\\boxed{\\frac{1}{2}}", {}, 1.0),
        ("It is 3", "4", {}, 0.0),
        ("I do not know", "4", {}, 0.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", {}, 1.0),
        ("first 7; #### 8", "8", {"pattern": r"#### (\S+)"}, 1.0),
        ("first 8; #### 7", "8", {"pattern": r"#### (\S+)"}, 0.0),
        ("8", "8", {"pattern": r"#### (\S+)"}, 0.0),
        ("8", 8, {}, 1.0),
        ("$0.00001$", 1e-05, {}, 1.0),
        ("$5$", 1e-05, {}, 0.0),
        ("$4$", ["3", "4"], {}, 1.0),
        ("$5$", ["3", "4"], {}, 0.0),
        ("1000", "1 000", {}, 1.0),
        ("3", "3 apples", {}, 1.0),
        ("$5$", "5 cm^2", {}, 1.0),
        ("$5$", "x=5", {}, 1.0),
        ("$7$", "3 + 4 = 7", {}, 1.0),
        ("72", "48/2 = 24 clips.\n#### 72", {}, 1.0),
    ],
)
def test_math(text: str, right: Any, options: dict[str, Any], reward: float) -> None:
    assert value(text, {"answer": right}, kind="math", **options) == reward


@pytest.mark.parametrize(
    ("right", "part"),
    [
        (r"10\sqrt{2}", "10"),
        (r"2\pi", "2"),
        ("3+4i", "3"),
        ("-2 + 7i", "7"),
        ("4x", "4"),
        ("2^{10}", "2"),
        (r"3\frac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", "3"),
        (r"(-\infty, 3)", "3"),
        ("1, 2, 3", "3"),
        ("2(x+1)", "2"),
        (r"1.5 \times 10^{3}", "10"),
    ],
)
def test_a_column_of_plain_latex_counts_whole(right: str, part: str) -> None:
    """Such columns are not marked by $, and math-verify alone takes the last number that it finds in them."""
    assert value(f"it is ${right}$", {"answer": right}, kind="math") == 1.0
    assert value(f"it is ${part}$", {"answer": right}, kind="math") == 0.0


def test_a_column_without_a_value_is_no_wrong_answer() -> None:
    with pytest.raises(NoAnswer, match="math-verify finds no value in column answer: ''"):
        value("4", {"answer": ""}, kind="math")


def test_math_verify_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(Refused, match="needs math-verify"):
        value("4", {"answer": "4"}, kind="math")
