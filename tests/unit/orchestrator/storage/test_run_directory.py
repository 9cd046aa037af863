"""The run directory: documents and rows that survive crashes, on a disk and on an object store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.errors import InputError
from orchestrator.storage import run_directory
from orchestrator.storage.row_line import encode
from orchestrator.storage.run_directory import RunDir


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    """A run directory on a disk, and one on a store whose objects cannot grow."""
    uri = str(tmp_path / "runs" / "a") if request.param == "local" else f"memory://{tmp_path}/runs/a"
    found = RunDir(uri)
    found.create()
    return found


# -- places


def test_a_run_directory_knows_its_name_and_places(run: RunDir) -> None:
    assert run.name == "a"
    assert run.at("checkpoints") == f"{run.uri}/checkpoints"


def test_the_uri_of_a_local_directory_is_its_path(tmp_path: Path) -> None:
    assert RunDir(f"file://{tmp_path}/a").uri == str(tmp_path / "a")
    assert RunDir("memory://b/runs/a/").uri == "memory://b/runs/a"


def test_creating_twice_leaves_nothing_but_the_directory(run: RunDir) -> None:
    run.create()
    assert run.fs.find(run.path) == []


def test_a_place_below_a_file_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as found:
        RunDir(str(tmp_path / "file" / "runs" / "a")).create()
    assert "the run directory cannot be written" in str(found.value)
    assert str(found.value).startswith(f"{tmp_path}/file/runs/a: ")
    assert str(found.value).endswith("give another --run-dir")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("below", ["", "runs/a"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, below: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=f"{link} is a link to {tmp_path}/gone, which does not exist"):
        RunDir(str(link / below)).create()
    assert link.is_symlink()
    (tmp_path / "gone").mkdir()
    RunDir(str(link / below)).create()


def test_a_protocol_that_is_not_known_is_wrong_input() -> None:
    with pytest.raises(InputError, match="nosuch://a"):
        RunDir("nosuch://a/b")


# -- documents


def test_documents_are_replaced_whole(run: RunDir) -> None:
    assert run.read_text("job.yaml") is None
    assert run.read_json("plan.json") is None
    assert not run.exists("job.yaml")
    run.write_text("job.yaml", "name: größer\n")
    run.write_text("job.yaml", "name: a\n")
    run.write_json("plan.json", {"a": [1, None]})
    assert run.exists("job.yaml")
    assert run.read_text("job.yaml") == "name: a\n"
    assert run.read_json("plan.json") == {"a": [1, None]}
    assert len(run.fs.find(run.path)) == 2


def test_text_beyond_ascii_survives(run: RunDir) -> None:
    run.write_text("report.html", "größer · 学")
    assert run.read_text("report.html") == "größer · 学"


def test_a_reader_never_sees_half_a_document(tmp_path: Path) -> None:
    """A writer that is killed over and over leaves the last whole document."""
    run = RunDir(str(tmp_path))
    run.write_json("status.json", {"n": 0})
    code = (
        "import sys; from orchestrator.storage.run_directory import RunDir\n"
        "run, n = RunDir(sys.argv[1]), 0\n"
        "while True:\n    n += 1; run.write_json('status.json', {'n': n, 'fill': 'x' * 100_000})\n"
        "    n == 3 and print(flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    seen = [run.read_json("status.json")["n"] for _ in range(200)]
    process.kill()
    process.wait()
    assert seen == sorted(seen)
    assert run.read_json("status.json")["n"] >= 3


# -- rows


def test_rows_come_back_in_order(run: RunDir) -> None:
    assert run.rows("rows.jsonl") == []
    run.append("rows.jsonl", [{"step": 1}, {"step": 2, "loss": 0.1}])
    run.append("rows.jsonl", [])
    run.append("rows.jsonl", [{"step": 3, "text": "größer\nand more"}])
    assert run.rows("rows.jsonl") == [
        {"step": 1},
        {"step": 2, "loss": 0.1},
        {"step": 3, "text": "größer\nand more"},
    ]


def test_floats_come_back_to_the_last_bit(run: RunDir) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308]
    run.append("rows.jsonl", [{"loss": value} for value in values])
    assert [row["loss"] for row in run.rows("rows.jsonl")] == values


def test_files_of_rows_do_not_mix(run: RunDir) -> None:
    run.append("rows.jsonl", [{"step": 1}])
    run.append("others.jsonl", [{"phase": "wait"}])
    assert run.rows("rows.jsonl") == [{"step": 1}]
    assert run.rows("others.jsonl") == [{"phase": "wait"}]


def test_a_writer_lists_parts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(f"memory://{tmp_path}/parts")
    listings: list[str] = []
    plain = run.fs.ls
    monkeypatch.setattr(run.fs, "ls", lambda path, **more: [listings.append(path), plain(path, **more)][1])
    for step in range(12):
        run.append("rows.jsonl", [{"step": step}])
    assert len(listings) == 1
    assert [row["step"] for row in RunDir(run.uri).rows("rows.jsonl")] == list(range(12))


def test_a_part_whose_answer_was_lost_is_not_written_twice(tmp_path: Path) -> None:
    """Whoever appended it appends the same rows again, perhaps with more; another's part is left alone."""
    run, other = RunDir(f"memory://{tmp_path}/parts"), RunDir(f"memory://{tmp_path}/parts")
    run.append("rows.jsonl", [{"step": 1}])
    other.append("rows.jsonl", [{"step": 2}])
    run.append("rows.jsonl", [{"step": 2}])
    other.append("rows.jsonl", [{"step": 3}])
    run.append("rows.jsonl", [{"step": 3}, {"step": 4}])
    other.append("rows.jsonl", [{"step": 5}])
    assert [row["step"] for row in run.rows("rows.jsonl")] == [1, 2, 3, 4, 5]


def test_a_disk_that_takes_half_of_the_rows_keeps_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(str(tmp_path))
    run.append("rows.jsonl", [{"step": 1}])
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        run.append("rows.jsonl", [{"step": 2}, {"step": 3}])
    with pytest.raises(OSError, match="No space left"):
        run.write_json("status.json", {})
    monkeypatch.undo()
    assert run.rows("rows.jsonl") == [{"step": 1}]
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_a_torn_last_row_is_dropped_and_the_next_is_not(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path))
    run.append("rows.jsonl", [{"step": 1}, {"step": 2}])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    assert run.rows("rows.jsonl") == [{"step": 1}]
    run.append("rows.jsonl", [{"step": 2, "again": True}])
    assert run.rows("rows.jsonl") == [{"step": 1}, {"step": 2, "again": True}]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_crash_anywhere_loses_only_the_row_it_tore(data: st.DataObject, tmp_path_factory: Any) -> None:
    run = RunDir(str(tmp_path_factory.mktemp("torn")))
    path = Path(run.path) / "rows.jsonl"
    rows = [{"step": n, "text": "ä\u2028é" * n} for n in range(data.draw(st.integers(1, 4)))]
    run.append("rows.jsonl", rows)
    kept = data.draw(st.integers(0, path.stat().st_size))
    path.write_bytes(path.read_bytes()[:kept])
    run.append("rows.jsonl", [{"step": 9}])
    whole = [row for row in rows if len(b"".join(map(encode, rows[: row["step"] + 1]))) <= kept + 1]
    assert run.rows("rows.jsonl") == [*whole, {"step": 9}]


# -- what is of no run


@pytest.mark.parametrize("name", ["job.yaml", "notes.txt", "plan.json", "metrics.jsonl"])
def test_a_directory_that_holds_something_else_is_refused(run: RunDir, name: str) -> None:
    run.write_text(name, "mine")
    with pytest.raises(InputError, match=rf"is not a run directory: it holds {name}"):
        run.create()
    assert run.read_text(name) == "mine"


@pytest.mark.parametrize("name", ["events.jsonl", "checkpoints/ATTEMPT", "trials.jsonl", ".lock"])
def test_a_run_s_own_directory_may_hold_notes(run: RunDir, name: str) -> None:
    run.fs.makedirs(f"{run.path}/checkpoints", exist_ok=True)
    run.write_text(name, "")
    run.write_text("notes.txt", "mine")
    run.create()


@pytest.mark.parametrize(
    "name",
    [
        ".lock", "job.yaml", "status.json", "summary.json", "events.jsonl", "checkpoints/ATTEMPT",
        "checkpoints/step-00000003/manifest.json",
    ],
)  # fmt: skip
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    run = RunDir(str(tmp_path / "a"))
    (tmp_path / "a/checkpoints").mkdir(parents=True)
    (tmp_path / "a" / name).mkdir(parents=True)
    with pytest.raises(InputError, match=f"a/{name}: is a folder and should be a file; move it away"):
        run.create()


def test_only_folders_that_were_made_are_removed_and_only_empty_ones(tmp_path: Path) -> None:
    made = RunDir(str(tmp_path / "runs" / "a")).create()
    assert made == (str(tmp_path / "runs"), str(tmp_path / "runs" / "a"))
    (tmp_path / "runs" / "note").write_text("mine")
    run_directory.remove_empty(made)
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "note"]
    assert RunDir(str(tmp_path / "runs")).create  # nothing is made where all is there
    (tmp_path / "empty").mkdir()
    assert RunDir(str(tmp_path / "empty")).create() == ()


@pytest.mark.parametrize("content", [b"", b'{"a"', b"[]", b"null", b"\xff\xfe"])
def test_a_damaged_document_that_decides_nothing_is_none(run: RunDir, content: bytes) -> None:
    run.fs.pipe_file(f"{run.path}/status.json", content)
    assert run.read_json_or_empty("status.json") == {}


def test_a_private_document_is_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(str(tmp_path / "a"))
    run.create()
    seen: list[int] = []
    replace = os.replace

    def noted(draft: str, target: str) -> None:
        seen.append(os.stat(draft).st_mode & 0o777)
        replace(draft, target)

    monkeypatch.setattr(os, "replace", noted)
    run.write_text("job.yaml", "a: b", private=True)
    run.write_text("job.yaml", "a: c", private=True)
    assert seen == [0o600, 0o600]
    assert Path(run.at("job.yaml")).stat().st_mode & 0o777 == 0o600
