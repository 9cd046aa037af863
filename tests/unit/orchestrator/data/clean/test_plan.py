from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.config.errors import InputError
from orchestrator.data.clean.config import TRAITS
from orchestrator.data.clean.plan import Cleaning, check_steps, cleaning_of
from orchestrator.data.config import DataSpec
from orchestrator.data.sources import resolve


def spec(folder: Path, steps: list[Any], **more: Any) -> DataSpec:
    given = {
        "sources": [{"uri": str(folder / "a.txt")}],
        "tokenizer": {"train_bpe": 300},
        "sequence_length": 8,
    }
    return DataSpec(**{**given, "clean": steps, **more})


def keys(folder: Path, steps: list[Any], **more: Any) -> list[str]:
    data = spec(folder, steps, **more)
    found = cleaning_of(data, resolve(data.sources), 1000)
    assert found is not None
    assert Cleaning.from_json(found.to_json()) == found
    return [step.key for step in found.steps]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": "evaluation"}))
    return tmp_path


def test_a_key_covers_the_steps_before_and_nothing_after(folder: Path) -> None:
    one = keys(folder, ["c4", "pii", "fineweb"])
    assert keys(folder, ["c4", "pii", {"fineweb": {"short_line": 9}}])[:2] == one[:2]
    other = keys(folder, ["c4", {"pii": {"action": "drop"}}, "fineweb"])
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]
    assert keys(folder, ["c4", "pii", "fineweb"]) == one
    assert len({*one, *keys(folder, ["pii", "c4", "fineweb"])}) == 6


def test_other_text_changes_what_compares_all_documents_alone(folder: Path) -> None:
    steps = ["c4", "exact_duplicates", "fineweb"]
    one = keys(folder, steps)
    (folder / "a.txt").write_text("other text")
    assert [a == b for a, b in zip(one, keys(folder, steps), strict=True)] == [True, False, False]


def test_held_out_and_evaluation_text_count_by_their_content(folder: Path, tmp_path: Path) -> None:
    held = {"validation": {"sources": [{"uri": str(folder / "eval.jsonl")}]}}
    steps = ["exact_duplicates", {"decontaminate": {"sources": [{"uri": str(folder / "eval.jsonl")}]}}]
    one, without = keys(folder, steps, **held), keys(folder, steps)
    assert one[0] != without[0]
    moved = folder / "moved.jsonl"
    (folder / "eval.jsonl").rename(moved)
    held = {"validation": {"sources": [{"uri": str(moved)}]}}
    steps = ["exact_duplicates", {"decontaminate": {"sources": [{"uri": str(moved)}]}}]
    assert keys(folder, steps, **held) == one
    moved.write_text(json.dumps({"text": "another"}))
    assert set(keys(folder, steps, **held)) & set(one) == set()


def test_lists_and_code_count_by_their_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "list").write_text("# bad\nbad.org\n\n")
    one = keys(folder, [{"url": {"domains": str(folder / "list")}}])
    (folder / "list").write_text("bad.org\n")
    assert keys(folder, [{"url": {"domains": str(folder / "list")}}]) == one
    (folder / "list").write_text("worse.org\n")
    assert keys(folder, [{"url": {"domains": str(folder / "list")}}]) != one
    (folder / "my_steps.py").write_text("def f(text, row):\n    return text\n")
    monkeypatch.syspath_prepend(str(folder))
    own = keys(folder, [{"own": {"function": "my_steps:f"}}])
    (folder / "my_steps.py").write_text("def f(text, row):\n    return text + ''\n")
    assert keys(folder, [{"own": {"function": "my_steps:f"}}]) != own


def test_so_does_what_that_code_imports_from_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the working directory, as all own code is."""
    steps = [{"own": {"function": "helped_steps:f"}}]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (folder / "helped_steps.py").write_text(
        "def f(text, row):\n    import helper_of_steps\n    return text\n"
    )
    (folder / "helper_of_steps.py").write_text("A = 1\n")
    one = cleaning_of(spec(folder, steps), resolve(spec(folder, steps).sources), 1000)
    assert one is not None
    assert one.code == {"helped_steps:f": one.steps[0].code}
    (folder / "helper_of_steps.py").write_text("A = 2\n")
    assert keys(folder, steps) != [one.key]
    (folder / "helper_of_steps.py").write_text("A = 1\n")
    assert keys(folder, steps) == [one.key]


def test_passes_end_with_what_compares_all_documents(folder: Path) -> None:
    data = spec(folder, ["c4", "exact_duplicates", "near_duplicates", "pii", "fineweb", "exact_duplicates"])
    found = cleaning_of(data, resolve(data.sources), 1000)
    assert found is not None
    assert [[step.name for step in steps] for steps in found.passes()] == [
        ["c4", "exact_duplicates", "near_duplicates"], ["pii", "fineweb", "exact_duplicates"],
    ]  # fmt: skip
    assert cleaning_of(spec(folder, []), [], 1000) is None


@pytest.mark.parametrize(
    ("steps", "more", "problem"),
    [
        ([{"language": {"keep": ["english"]}}], {}, "no language is called english"),
        ([{"url": {}}], {}, "names nothing to remove"),
        ([{"url": {"domains": "/no/such/list"}}], {}, "cannot be read"),
        ([{"decontaminate": {"sources": [{"uri": "/no/such.txt"}]}}], {}, "there is no such file"),
        ([{"own": {"function": "no_such_module:f"}}], {}, "there is no module"),
        (
            ["c4"],
            {"sources": [{"uri": "a.jsonl", "field": ("a", "b")}]},
            "cleans text, and data.sources.0 holds pairs",
        ),
    ],
)
def test_what_a_step_lacks_is_told_before_anything_is_done(
    folder: Path, steps: list[Any], more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        check_steps(spec(folder, steps, **more))


@pytest.mark.parametrize(
    "steps",
    [["c5"], [{"c4": {}, "pii": {}}], [{}], [{"c4": {"x": 1}}], [{"near_duplicates": {"threshold": 1.0}}]],
)
def test_steps_that_are_none_are_refused(folder: Path, steps: list[Any]) -> None:
    with pytest.raises(ValidationError):
        spec(folder, steps)


def test_each_step_has_a_function_of_its_name() -> None:
    """`url` and `decontaminate` get more than their options; steps that compare all documents have modules."""
    from orchestrator.data.clean import datatrove_rules, document_rules

    for name, traits in TRAITS.items():
        if not traits.compares_all and name != "decontaminate":
            assert callable(getattr(datatrove_rules if traits.by_datatrove else document_rules, name))
