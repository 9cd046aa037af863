"""Runs beside each other: numbers, curves on one scale, and where their job files differ."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from run_directories import run_of

from orchestrator.config.errors import InputError
from orchestrator.observe.pages import compare, runs_page
from orchestrator.storage.process_identity import process_identity
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def two(tmp_path: Path) -> list[RunDir]:
    return [
        run_of(tmp_path / "a"),
        run_of(tmp_path / "b", "train", (6.0, 4.0), seen=time.time(), steps=7, optimizer={"lr": 0.5}),
    ]


def test_numbers_and_differences(two: list[RunDir]) -> None:
    found = compare.compared(two)
    facts = dict(compare.facts(found))
    assert facts["state"] == ["done", "running"]
    assert facts["loss"] == ["2.0000", "4.0000"]
    assert facts["loss of wiki"] == ["2.5000", "4.5000"]
    assert "cost" not in facts  # no run has one
    differences = dict(compare.differences(found))
    assert differences["train.optimizer.lr"] == ["0.003", "0.5"]
    assert differences["train.optimizer.warmup"] == ["2", "0"]
    assert {key.split(".")[0] for key in differences} == {"train"}, "the name is no difference"


def test_curves_have_one_scale(two: list[RunDir]) -> None:
    first, second = compare.on_terminal(compare.compared(two))
    assert (first[0], second[0]) == ("a", "b")
    assert first.replace(" ", "") == "a▅▃▁"
    assert second.replace(" ", "") == "b█▅"


def test_the_page_has_every_run_and_nothing_from_outside(two: list[RunDir]) -> None:
    page = compare.page(compare.compared(two))
    assert page.count('<path class="line c0"') == page.count('<path class="line c1"') >= 2
    assert "train.optimizer.lr" in page
    assert "http" not in page.replace("http-equiv", "")


def test_losses_of_other_objectives_have_both_units() -> None:
    assert compare._title("loss", ["dpo", "causal_lm", "dpo"]) == ("Loss", "nats a pair or nats a token")
    assert compare._title("loss of test", ["regression"]) == ("Loss of test", "a record")
    assert compare._title("tokens_per_second", ["samples"]) == ("Speed", "samples a second")


@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_few_or_too_many_are_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(InputError, match="takes 2 to 8"):
        compare.compared([RunDir(str(tmp_path / str(n))) for n in range(count)])


def test_the_same_run_twice_is_refused(two: list[RunDir]) -> None:
    with pytest.raises(InputError, match="different runs"):
        compare.compared([two[0], two[0]])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = compare.compared([run_of(tmp_path / "x" / "a"), run_of(tmp_path / "y" / "a")])
    assert [run.label for run in found] == [str(tmp_path / "x" / "a"), str(tmp_path / "y" / "a")]


def test_all_runs_of_a_folder_are_found_by_words(tmp_path: Path, two: list[RunDir]) -> None:
    run_of(tmp_path / "chain" / "stage")
    (tmp_path / "_data" / "x").mkdir(parents=True)
    (tmp_path / "stray.txt").touch()
    runs = runs_page.Runs(str(tmp_path)).find()
    assert list(runs) == ["a", "b", "chain/stage"]
    assert runs_page.listed(runs)[0]["name"] == "b", "what trains is first"
    assert [row["name"] for row in runs_page.listed(runs, "STAGE done")] == ["chain/stage"]
    assert [row["name"] for row in runs_page.listed(runs, "0.5 train")] == ["b"]
    assert runs_page.listed(runs, "nowhere") == []
    page = runs_page.page("runs", runs_page.listed(runs), '"><script>', 3)
    assert "<script>" not in page
    assert 'href="/run/chain/stage"' in page


def test_a_second_look_reads_only_the_runs_that_changed(
    tmp_path: Path, two: list[RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a` has ended, and `b` trains."""
    read: list[str] = []
    real = LocalFileSystem.cat_file

    def cat_file(self: LocalFileSystem, path: str, *which: Any, **how: Any) -> bytes:
        read.append(Path(path).parent.name)
        return real(self, path, *which, **how)

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    runs, seen = runs_page.Runs(str(tmp_path)), runs_page.Seen()
    first = runs_page.listed(runs.find(), seen=seen)
    assert {"a", "b"} <= set(read)
    read.clear()
    assert runs_page.listed(runs.find(), seen=seen) == first
    assert set(read) == {"b"}
    read.clear()
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    (tmp_path / "a" / "next").write_text(json.dumps({**status, "note": "changed"}))
    (tmp_path / "a" / "next").replace(tmp_path / "a" / "status.json")
    rows = {row["name"]: row for row in runs_page.listed(runs.find(), seen=seen)}
    assert "a" in read
    assert rows["a"]["says"] == "changed"
    (tmp_path / "a" / "status.json").unlink()
    assert {row["name"] for row in runs_page.listed(runs.find(), "stage", seen)} == set()
    shutil.rmtree(tmp_path / "a")
    assert [row["name"] for row in runs_page.listed(runs.find(), seen=seen)] == ["b"]


def test_a_damaged_run_hides_no_other(tmp_path: Path, two: list[RunDir]) -> None:
    (tmp_path / "a" / "status.json").write_text("{")
    (tmp_path / "b" / "status.json").write_text(json.dumps({"phase": None}))
    rows = runs_page.listed(runs_page.Runs(str(tmp_path)).find())
    assert {row["name"]: row["state"] for row in rows} == {"a": "unknown", "b": "unknown"}


def test_a_run_whose_controller_was_killed_is_lost(two: list[RunDir]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = process_identity(process.pid)
    two[1].write_json("status.json", {"phase": "train", "time": time.time(), "processes": [identity]})
    assert dict(compare.facts(compare.compared(two)))["state"] == ["done", "lost"]
