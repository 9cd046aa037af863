"""What the exports of a chain must keep: the key `compress`, and what counts as too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.chain.exports import ExportTable, check_compress
from orchestrator.chain.measured_exports import EXPORTS, compared, rows_of, shares, shortfall
from orchestrator.chain.stage_run import stage_runs
from orchestrator.config.chain import ChainSpec, parse_chain
from orchestrator.config.errors import InputError
from orchestrator.storage.run_directory import RunDir


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "smaller",
        "data": {
            "sources": [{"uri": "corpus/*.txt"}],
            "tokenizer": {"train_bpe": 512},
            "sequence_length": 64,
        },
        "train": {"steps": 10, "global_batch": 8},
        "workload": {"model": "gpt-tiny"},
        "checkpoint": {"export": "hf"},
        "compress": {"keep": 0.9, "held_out": "held.txt", **changes},
        "stages": [
            {"name": "teacher"},
            {"name": "student", "data": {"tokenizer": "stage:teacher"}},
            {"name": "draft", "data": {"tokenizer": "stage:teacher"}, "checkpoint": {"export": None}},
        ],
    }


def test_the_teacher_is_the_first_stage_with_an_export_and_comes_first() -> None:
    chain = parse_chain(document())
    assert chain.compress is not None
    assert chain.compress.teacher == "teacher"
    assert [stage.name for stage in parse_chain(document(teacher="student")).exporting] == [
        "student",
        "teacher",
    ]
    placed = chain.with_paths(Path("/base"))
    assert placed.compress is not None
    assert placed.compress.held_out == "/base/held.txt"
    assert parse_chain(placed.document()) == placed
    assert parse_chain({**document(), "compress": None}).exporting == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"keep": 1.2}, "compress: keep: should be less than or equal to 1"),
        ({"kept": 0.9}, "kept: unknown key"),
        ({"nothing": 1}, "nothing: unknown key"),
        ({"teacher": "draft"}, "draft is not a stage with an export; name one of teacher, student"),
        ({"teacher": "nobody"}, "nobody is not a stage with an export"),
    ],
)
def test_what_is_wrong_is_said_where(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        parse_chain(document(**changes))
    assert says in str(error.value)
    assert "compress" in str(error.value)


def test_the_teacher_may_be_an_export_of_another_run(tmp_path: Path) -> None:
    given = document(teacher="./large/export")
    given["stages"][1]["checkpoint"] = {"export": None}
    chain = parse_chain(given).with_paths(tmp_path)
    teacher = str(tmp_path / "large/export")
    assert compared(chain) == (teacher, "teacher")
    assert parse_chain(chain.document()) == chain
    with pytest.raises(InputError, match="is not a folder"):
        check_compress(chain, stage_runs(chain, RunDir(str(tmp_path / "runs"))))


def test_one_export_is_compared_with_nothing() -> None:
    given = document()
    given["stages"][1]["checkpoint"] = {"export": None}
    with pytest.raises(InputError, match="fewer than two stages make one"):
        parse_chain(given)


def test_an_objective_or_a_metric_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    root = RunDir(str(tmp_path))
    chain = parse_chain(document(metric="f1"))
    with pytest.raises(InputError, match="f1 is not measured") as error:
        check_compress(chain, stage_runs(chain, root))
    assert "perplexity" in error.value.hint
    given = document()
    given["workload"] = {"model": "t5-tiny", "objective": "span_corruption"}
    chain = parse_chain(given)
    with pytest.raises(InputError, match="teacher trains span_corruption, whose exports are not measured"):
        check_compress(chain, stage_runs(chain, root))


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"checkpoint": {"export": "gguf"}}, "student is exported as gguf, which is not measured"),
        (
            {"workload": {"objective": "conversation"}},
            "student trains conversation, and teacher causal_lm: their exports cannot be compared",
        ),
    ],
)
def test_exports_that_cannot_be_compared_are_refused_before_a_stage_begins(
    stage: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (held := tmp_path / "held.txt").write_text("words")
    given = document(held_out=str(held))
    given["stages"][1] |= stage
    chain = parse_chain(given)
    with pytest.raises(InputError) as error:
        check_compress(chain, stage_runs(chain, RunDir(str(tmp_path))))
    assert str(error.value).startswith(f"compress: {says}")
    assert "null" in error.value.hint


def measured(chain: ChainSpec, root: RunDir, share: float) -> None:
    assert chain.compress is not None
    rows = {"teacher": {"export": "teacher", "share": 1.0}, "student": {"export": "student", "share": share}}
    asked = {
        "held_out": chain.compress.held_out,
        "teacher": chain.compress.teacher,
        "samples": chain.compress.samples,
    }
    root.write_json(EXPORTS, {"metric": "perplexity", **asked, "rows": rows})


def test_a_stage_below_the_share_falls_short_and_other_rows_do_not_count(tmp_path: Path) -> None:
    root = RunDir(str(tmp_path))
    chain = parse_chain(document())
    assert shortfall(chain, root, "student") == ""
    measured(chain, root, 0.899)
    says = "its export keeps 89.9 % of teacher's perplexity, less than compress.keep of 90 %"
    assert shortfall(chain, root, "student") == says
    assert shortfall(chain, root, "teacher") == shortfall(chain, root, "draft") == ""
    assert [row["export"] for row in rows_of(chain, root)] == ["teacher", "student"]
    measured(chain, root, 0.9)
    assert shortfall(chain, root, "student") == ""
    for other in (
        document(held_out="other.txt"),
        document(metric="loss"),
        document(teacher="student"),
        document(samples=7),
    ):
        assert shares(parse_chain(other), root) == {}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("absent.txt", None, "compress.held_out {held}: there is no such file"),
        ("empty.txt", "", "compress.held_out: all files are empty"),
        ("other.jsonl", '{"words": "a b"}\n', "{held}: line 1, at byte 0: has no text 'text'"),
    ],
)
def test_held_out_rows_are_checked_before_a_stage_begins(
    name: str, content: str | None, says: str, tmp_path: Path
) -> None:
    held = tmp_path / name
    if content is not None:
        held.write_text(content)
    chain = parse_chain(document(held_out=str(held)))
    with pytest.raises(InputError) as error:
        check_compress(chain, stage_runs(chain, RunDir(str(tmp_path))))
    assert str(error.value).startswith(says.format(held=held))


def table(tmp_path: Path) -> ExportTable:
    chain = parse_chain(document(held_out=str(tmp_path / "held.txt"), rounds=0))
    root = RunDir(str(tmp_path))
    return ExportTable(
        chain, stage_runs(chain, root), root, lambda spec, run, before: before, lambda status: None
    )


def test_exports_are_good_until_an_export_or_the_rows_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the rows and of the teacher counts too, because shares follow from both."""
    held = tmp_path / "held.txt"
    marks = [tmp_path / name / "export/export.json" for name in ("teacher", "student")]
    for mark in marks:
        mark.parent.mkdir(parents=True)

    def measure(self: ExportTable, names: Any, rounds: int) -> None:
        measured(self._chain, self._root, 0.95)
        found = self._root.read_json_or_empty(EXPORTS)
        for name in names:
            found["rows"][name] |= {"mark": self._mark(name), "speeds": []}
        self._root.write_json(EXPORTS, found)

    monkeypatch.setattr(ExportTable, "_measure", measure)
    for file in (held, *marks, held, marks[0]):
        for each in (held, *marks):
            if not each.exists():
                each.write_text("{}")
        file.write_text(file.read_text() + " ")
        assert not table(tmp_path).are_good()
        table(tmp_path).measure_all()
        assert table(tmp_path).are_good()
    found = RunDir(str(tmp_path)).read_json_or_empty(EXPORTS)
    found["rows"]["student"]["share"] = 0.5
    RunDir(str(tmp_path)).write_json(EXPORTS, found)
    assert not table(tmp_path).are_good()
