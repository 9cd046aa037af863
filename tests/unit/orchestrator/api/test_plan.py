"""The plan of a job as a value: the numbers of `orchestrator plan`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import job, write_text

from orchestrator import Job, JobPlan, plan
from orchestrator.cli.app import call
from orchestrator.config.errors import InputError


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    found = job(write_text(tmp_path, 20_000))
    found["resources"] = {"workers": {"min": 1, "max": 4}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(found))
    return found


@pytest.mark.parametrize(("options", "words"), [
    ({"machine": "a100-80"}, ["--machine", "a100-80"]),
    ({"machine": "h100-80", "workers": 2}, ["--machine", "h100-80", "--workers", "2"]),
    ({"machine": "a100-80", "trace": False}, ["--machine", "a100-80", "--trace", "off"]),
])  # fmt: skip
def test_it_is_what_the_command_shows(
    document: dict[str, Any], options: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(Job(**document), **options)
    with pytest.raises(SystemExit):
        call(["plan", "job.yaml", *words, "--json"])
    shown = json.loads(capsys.readouterr().out)
    predicted = shown["predicted"]
    assert str(found.layout) == shown["chosen"]["text"]
    assert found.workers == found.layout.world == options.get("workers", 4)
    assert (found.step_seconds, found.tokens_per_second) == (
        predicted["step_seconds"],
        predicted["tokens_per_second"],
    )
    assert (found.memory_bytes, found.fits) == (predicted["memory_bytes"], predicted["fits"])
    assert found.device == shown["machine"]["name"]
    assert shown["candidates"] == [
        {
            "layout": str(each.layout),
            "memory_bytes": each.memory_bytes,
            "step_seconds": round(each.step_seconds, 4),
        }
        for each in found.layouts
    ]
    assert [(str(layout), reason) for layout, reason in found.rejected] == [
        (each["layout"], each["reason"]) for each in shown["rejected"]
    ]
    assert list(found.assumed) == shown.get("assumed", [])


def test_a_plan_is_frozen_and_can_be_compared(document: dict[str, Any]) -> None:
    found = plan(Job(**document), machine="a100-80", workers=1)
    assert isinstance(found, JobPlan)
    assert found == plan(Job(**document), machine="a100-80", workers=1)
    assert {found: 1}[found] == 1
    assert repr(found).startswith(f"JobPlan({found.layout}, ")
    assert "\n" not in repr(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.workers = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "options", "line"),
    [
        ({}, {"workers": 0}, r"^workers: must be an integer of at least 1, or None \(got 0\)"),
        ({}, {"workers": True}, r"^workers: must be an integer of at least 1, or None \(got True\)"),
        ({}, {"machine": "abacus"}, "abacus"),
        ({"sources": [{"uri": "missing.txt"}]}, {}, "there is no such file"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    document: dict[str, Any], given: dict[str, Any], options: dict[str, Any], line: str
) -> None:
    document["data"] |= given
    with pytest.raises(InputError, match=line):
        plan(Job(**document), **options)
    with pytest.raises(InputError, match=r"^job: must be a Job, not str"):
        plan("job.yaml")  # type: ignore[arg-type]
