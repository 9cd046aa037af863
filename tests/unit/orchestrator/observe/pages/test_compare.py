"""Runs beside each other: numbers, curves on one scale, and where their job files differ."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from run_directories import run_of

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
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


def test_how_a_search_varies_a_job_is_no_difference_of_its_run(two: list[RunDir]) -> None:
    spec = read_job(two[0])
    assert spec is not None
    tuned = parse(
        spec.model_dump(mode="json") | {"tune": {"space": {"seed": {"choice": [1, 2]}}, "trials": 2}}
    )
    two[0].write_text("job.yaml", dump(tuned))
    assert {key.split(".")[0] for key, _ in compare.differences(compare.compared(two))} == {"train"}


def test_a_curve_of_fewer_steps_than_cells_has_no_gaps() -> None:
    bars = compare._bars([(step, 1.0 / step) for step in range(1, 41)], 1, 40, 0.0, 1.0)
    assert " " not in bars


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
    assert compare._title("loss", ["dpo", "causal_lm", "dpo"]) == ("Loss", "nats per pair or nats per token")
    assert compare._title("loss of test", ["regression"]) == ("Loss of test", "per record")
    assert compare._title("tokens_per_second", ["samples"]) == ("Speed", "samples per second")


@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_few_or_too_many_are_refused(tmp_path: Path, count: int) -> None:
    runs = [run_of(tmp_path / str(n), steps=9 + n) for n in range(count)]
    with pytest.raises(InputError, match="takes 2 to 8"):
        compare.compared(runs)


def seeds_of(
    folder: Path, losses: dict[int, tuple[float, ...]], phases: dict[int, str] | None = None, **train: Any
) -> list[RunDir]:
    """Runs of one job, one for each seed with its losses; a phase is that of a seed that is not done."""
    return [
        run_of(folder / f"a-{seed}", (phases or {}).get(seed, "done"), of, seed=seed, **train)
        for seed, of in losses.items()
    ]


def test_runs_that_differ_by_seed_alone_are_one_column(tmp_path: Path) -> None:
    """Means and deviations are those of the standard library, by step and at the end."""
    losses = {0: (4.0, 3.0, 2.0), 1: (4.4, 3.3, 2.5), 2: (4.1, 2.7, 2.1)}
    other = run_of(tmp_path / "b", losses=(5.0, 4.0, 3.5), steps=7)
    columns = compare.compared([*seeds_of(tmp_path, losses), other])
    assert [column.title for column in columns] == ["a-0 and 2 more (mean of 3 seeds)", "b"]
    last = [of[-1] for of in losses.values()]
    facts = dict(compare.facts(columns))
    assert facts["loss"] == [f"{statistics.fmean(last):.4f} ± {statistics.stdev(last):.4f}", "3.5000"]
    assert facts["state"] == ["done", "done"]
    differences = dict(compare.differences(columns))
    assert differences["seed"] == ["0, 1, 2", "3"]
    assert differences["train.steps"] == ["12", "7"]
    found = compare.as_json(columns)
    seeds = found["seeds"]["a-0 and 2 more"]
    assert seeds["runs"] == {"0": "a-0", "1": "a-1", "2": "a-2"}
    assert seeds["final"]["loss of wiki"]["mean"] == pytest.approx(statistics.fmean(last) + 0.5)
    for point, step in zip(seeds["loss"], zip(*losses.values(), strict=True), strict=True):
        assert point["mean"] == pytest.approx(statistics.fmean(step))
        assert point["deviation"] == pytest.approx(statistics.stdev(step))
    page = compare.page(columns)
    assert '<path class="band b0"' in page
    assert '<path class="band b1"' not in page


def test_a_mean_is_of_seeds_that_are_done_and_of_steps_that_all_have(tmp_path: Path) -> None:
    losses = {0: (4.0, 3.0, 2.0), 1: (4.0, 2.0), 2: (9.0,)}
    (column,) = compare.compared(seeds_of(tmp_path, losses, {2: "train"}))
    assert column.title == "a-0 and 2 more (mean of 2 of 3 seeds)"
    assert column.curve("loss") == [(1.0, 4.0), (2.0, 2.5)]
    assert compare.alike([column]) == "the job files are the same but for name and seed"


def test_seeds_of_which_none_is_done_have_a_curve_and_no_mean_at_the_end(tmp_path: Path) -> None:
    losses = {0: (4.0, 3.0, 2.0), 1: (4.0, 2.0), 2: (9.0,)}
    seeds = seeds_of(tmp_path, losses, dict.fromkeys(losses, "train"))

    def fail(run: RunDir) -> None:
        run.append("events.jsonl", [{"time": 9.0, "attempt": 1, "phase": "failed"}])
        run.write_json("status.json", run.read_json_or_empty("status.json") | {"phase": "failed"})

    fail(seeds[2])
    (column,) = compare.compared(seeds)
    assert column.title == "a-0 and 2 more (3 seeds, none done)"
    assert column.curve("loss") == [(1.0, 4.0), (2.0, 2.5)], "of those that have not failed"
    assert "loss" not in dict(compare.facts([column]))
    assert compare.as_json([column])["seeds"]["a-0 and 2 more"]["final"] == {}
    fail(seeds[0])
    fail(seeds[1])
    (column,) = compare.compared(seeds)
    assert column.curve("loss") == []
    assert "<html" in compare.page([column])


def test_a_mean_of_fewer_seeds_than_the_title_says_so(tmp_path: Path) -> None:
    seeds = seeds_of(tmp_path, {0: (4.0, 3.0), 1: (4.0, 2.0), 2: (4.0, 2.0)})
    rows = seeds[2].rows("metrics.jsonl")
    (tmp_path / "a-2" / "metrics.jsonl").unlink()
    for row in rows:
        seeds[2].append("metrics.jsonl", [{k: v for k, v in row.items() if k != "evaluations"}])
    facts = dict(compare.facts(compare.compared(seeds)))
    assert facts["loss of wiki"] == ["3.0000 ± 0.7071 (2 of 3)"]
    assert facts["loss"] == ["2.3333 ± 0.5774"]


def test_seeds_of_other_code_or_data_are_apart_and_those_of_other_limits_are_not(tmp_path: Path) -> None:
    seeds = seeds_of(tmp_path, dict.fromkeys(range(4), (3.0, 2.0)))
    for run, code in zip(seeds, ("1", "1", "2"), strict=False):  # the last one has no commit
        store = Store(run.commits)
        piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
        meta = {"position": 2, "receipt": "", "code": {"own.py": code}, "shards": "s"}
        store.publish(2, store.write_raw(2, 0, [piece]), meta)
    columns = compare.compared(seeds)
    assert [len(column.runs) for column in columns] == [2, 1, 1]
    assert [name for name, _ in compare.differences(columns)] == ["seed", "own code"]
    spec = read_job(seeds[1])
    assert spec is not None
    seeds[1].write_text(
        "job.yaml", dump(spec.with_parts(limits=spec.limits.model_copy(update={"hours": 9.0})))
    )
    columns = compare.compared(seeds[:2])
    assert [len(column.runs) for column in columns] == [2]


def test_a_loss_that_is_no_number_breaks_no_comparison(tmp_path: Path) -> None:
    (column,) = compare.compared(seeds_of(tmp_path, {0: (4.0, math.nan), 1: (4.0, math.inf)}))
    assert dict(compare.facts([column]))["loss"] == ["nan ± nan"]
    assert "<svg" in compare.page([column])


def test_runs_of_the_same_seed_are_no_sample_of_seeds(tmp_path: Path) -> None:
    columns = compare.compared([run_of(tmp_path / "a"), run_of(tmp_path / "b")])
    assert [column.title for column in columns] == ["a", "b"]
    seeds = seeds_of(tmp_path / "s", {3: (3.0, 2.0), 4: (3.0, 1.0)})
    spec = read_job(seeds[1])
    assert spec is not None
    elsewhere = spec.with_parts(data=spec.data.model_copy(update={"cache": "/elsewhere"}))
    seeds[1].write_text("job.yaml", dump(elsewhere))
    columns = compare.compared([*seeds, run_of(tmp_path / "again")])
    assert [column.title for column in columns] == ["a-3 and 1 more (mean of 2 seeds)", "again"]


def test_more_seeds_than_columns_are_compared(tmp_path: Path) -> None:
    columns = compare.compared(seeds_of(tmp_path, dict.fromkeys(range(9), (2.0, 1.0))))
    assert len(columns) == 1


def test_the_same_run_twice_is_refused(two: list[RunDir]) -> None:
    with pytest.raises(InputError, match="different runs"):
        compare.compared([two[0], two[0]])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = compare.compared([run_of(tmp_path / "x" / "a"), run_of(tmp_path / "y" / "a")])
    assert [column.label for column in found] == [str(tmp_path / "x" / "a"), str(tmp_path / "y" / "a")]


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
    first = runs_page.listed(runs.find(), cache=seen)
    assert {"a", "b"} <= set(read)
    read.clear()
    assert runs_page.listed(runs.find(), cache=seen) == first
    assert set(read) == {"b"}
    read.clear()
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    (tmp_path / "a" / "next").write_text(json.dumps({**status, "note": "changed"}))
    (tmp_path / "a" / "next").replace(tmp_path / "a" / "status.json")
    rows = {row["name"]: row for row in runs_page.listed(runs.find(), cache=seen)}
    assert "a" in read
    assert rows["a"]["says"] == "changed"
    (tmp_path / "a" / "status.json").unlink()
    assert {row["name"] for row in runs_page.listed(runs.find(), "stage", seen)} == set()
    shutil.rmtree(tmp_path / "a")
    assert [row["name"] for row in runs_page.listed(runs.find(), cache=seen)] == ["b"]


def test_a_row_is_read_again_after_any_change_of_a_file_or_of_who_may_read_it(
    tmp_path: Path, two: list[RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the time of the file and its number stay."""
    seen = runs_page.Seen()
    status = tmp_path / "a" / "status.json"
    before = status.stat()
    with monkeypatch.context() as patch:
        real = LocalFileSystem.cat_file

        def refused(self: LocalFileSystem, path: str, *which: Any, **how: Any) -> bytes:
            if path.endswith("a/job.yaml"):
                raise PermissionError(13, "Permission denied", path)
            return real(self, path, *which, **how)

        patch.setattr(LocalFileSystem, "cat_file", refused)
        rows = {
            row["name"]: row for row in runs_page.listed(runs_page.Runs(str(tmp_path)).find(), cache=seen)
        }
    assert "job.yaml" in rows["a"]["says"]
    assert "a" not in seen, "the next look may be allowed to read it"
    runs = {"a": RunDir(str(tmp_path / "a"))}
    assert "job.yaml" not in runs_page.listed(runs, cache=seen)[0]["says"]
    assert "a" in seen
    status.write_text(json.dumps({**json.loads(status.read_text()), "note": "changed"}))
    os.utime(status, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert status.stat().st_ino == before.st_ino
    assert runs_page.listed(runs, cache=seen)[0]["says"] == "changed"
    known = runs_page._state_of_files(runs["a"])
    status.chmod(0o600 if status.stat().st_mode & 0o077 else 0o644)
    assert runs_page._state_of_files(runs["a"]) != known
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    assert runs_page._state_of_files(RunDir(str(tmp_path / "c")))[0] != runs["a"].path == known[0]


def test_a_search_reads_each_job_once(
    tmp_path: Path, two: list[RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    redacted: list[str] = []
    real = runs_page.redact
    monkeypatch.setattr(runs_page, "redact", lambda text: redacted.append(text) or real(text))
    runs = runs_page.Runs(str(tmp_path)).find()
    counts = []
    for words in ("train", "train train train"):
        redacted.clear()
        assert len(runs_page.listed(runs, words)) == 2
        counts.append(len(redacted))
    assert counts[0] == counts[1]


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
