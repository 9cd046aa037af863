"""Whole chains on local processes: kills change no bit, what is done stays, what has changed is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_chain import drive_chain_here

from orchestrator.chain.preflight import check_chain
from orchestrator.chain.stage_run import stage_runs
from orchestrator.checkpoint.commit_store import Store
from orchestrator.cli.app import call
from orchestrator.config.chain import parse_chain
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.controller import decide
from orchestrator.storage.run_directory import RunDir

STEPS = 4


def document(text: str) -> dict[str, Any]:
    """A base, a classification on top of it, and more of the same text on top of it."""
    found = job(text, steps=STEPS, optimizer={"lr": 3e-3, "schedule": "constant"})
    found |= {"name": "c", "parallel": {"micro_batch": 2}}
    found["checkpoint"] = {"every": 2, "keep": 3, "export": None}
    records = str(Path(text).with_name("records.jsonl"))
    columns = {"text": "text", "label": "label"}
    classify = {
        "name": "classify",
        "workload": {"init_from": "stage:base", "objective": "sequence_classification"},
        "data": {
            "sources": [{"uri": records, "field": columns}],
            "labels": ["short", "long"],
            "tokenizer": "stage:base",
        },
    }
    more = {"name": "more", "workload": {"init_from": "stage:base@2"}, "seed": 5}
    return found | {"stages": [{"name": "base"}, classify, more]}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = write_text(tmp_path_factory.mktemp("text"), 20_000)
    lines = [line for line in Path(found).read_text().splitlines() if len(line) > 10][:80]
    labelled = [{"text": line, "label": int(len(line) > 50)} for line in lines]
    Path(found).with_name("records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return found


@pytest.fixture(scope="module")
def quiet(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "quiet"
    with pytest.MonkeyPatch.context() as patch:
        ended = drive_chain_here(document(text), root, Path(text).parent / "cache", patch)
    assert (ended.outcome, ended.line) == (Outcome.DONE, "")
    return root


def check(wanted: dict[str, Any], root: Path, text: str) -> set[str]:
    """The stages that are done, if nothing is wrong."""
    wanted["data"]["cache"] = str(Path(text).parent / "cache")
    chain, place = parse_chain(wanted), RunDir(str(root))
    return check_chain(chain, stage_runs(chain, place), place, None)


def test_stages_begin_with_what_others_made(quiet: Path, text: str) -> None:
    """Asked for in kuberay#2363."""
    found = json.loads((quiet / "chain.json").read_text())
    assert (found["state"], [stage["state"] for stage in found["stages"]]) == ("done", ["done"] * 3)
    assert [stage["begins_with"] and stage["begins_with"]["step"] for stage in found["stages"]] == [
        None,
        4,
        2,
    ]
    assert rows(quiet / "more")[0]["loss"] < rows(quiet / "base")[0]["loss"]
    assert '<a href="classify/report.html">classify</a>' in (quiet / "report.html").read_text()
    assert check(document(text), quiet, text) == {"base", "classify", "more"}


KILLS = {"base": ("kill@1:3",), "classify": ("kill@0:1",), "more": ("kill@1:4",)}


@pytest.mark.parametrize(
    ("killed", "there"),
    [
        (("classify",), ("base", "more")),  # goes on in the middle
        pytest.param(("base", "classify", "more"), (), marks=pytest.mark.slow),
    ],
)
def test_kills_change_no_bit(
    quiet: Path,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: tuple[str, ...],
    there: tuple[str, ...],
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    for name in there:
        shutil.copytree(quiet / name, tmp_path / "c" / name)
    (tmp_path / "c").mkdir(exist_ok=True)
    (tmp_path / "c" / "chain.json").write_text("{}")
    faults = {name: KILLS[name] for name in killed}
    drive_chain_here(document(text), tmp_path / "c", Path(text).parent / "cache", monkeypatch, faults)
    for name in ("base", "classify", "more"):
        assert curve(tmp_path / "c" / name) == curve(quiet / name)
        assert weights(tmp_path / "c" / name, STEPS) == weights(quiet / name, STEPS)
        assert len(rows(tmp_path / "c" / name, "events.jsonl")) > len(rows(quiet / name, "events.jsonl")) or (
            name in there
        )


@pytest.fixture
def mine(quiet: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quiet, tmp_path / "c"))


def test_a_finished_chain_may_be_moved(mine: Path, text: str) -> None:
    assert check(document(text), mine, text) == {"base", "classify", "more"}


def test_a_stage_that_is_added_or_renamed_is_the_only_one_to_run(mine: Path, text: str) -> None:
    wanted = document(text)
    wanted["stages"][1] |= {"name": "again", "train": {"optimizer": {"lr": 1e-3}}}
    assert check(wanted, mine, text) == {"base", "more"}
    shutil.rmtree(mine / "more")
    assert check(document(text), mine, text) == {"base", "classify"}


@pytest.mark.parametrize(
    ("stage", "change", "wanted"),
    [
        (1, {"seed": 8}, "stages.classify: .*: seed is 3 in this run and 8"),
        (0, {"seed": 8}, "stages.base: .*: seed is 3 in this run and 8"),
        (2, {"workload": {"init_from": "stage:base@last"}}, "stages.more: .*init_from is 'base@2'"),
        (
            0,
            {"train": {"steps": 6}},
            "it began with the commit of base at step 4, but base has not finished its current training",
        ),
    ],
)
def test_what_has_changed_is_refused(
    mine: Path, text: str, stage: int, change: dict[str, Any], wanted: str
) -> None:
    document_ = document(text)
    document_["stages"][stage] |= change
    with pytest.raises(InputError, match=wanted) as found:
        check(document_, mine, text)
    assert str(found.value).endswith("move its folder away: it is then run again")


def test_text_that_has_changed_is_noticed_and_text_that_is_gone_is_not_missed(
    mine: Path, text: str, tmp_path: Path
) -> None:
    wanted, other = document(text), tmp_path / "topics.txt"
    shutil.copy(text, other)
    wanted["data"]["sources"] = [{"uri": str(other)}]
    assert check(wanted, mine, text) == {"base", "classify", "more"}
    other.write_text(other.read_text().replace("a", "b"))
    with pytest.raises(
        InputError, match=r"stages.base: data.sources: the text has changed since the stage began"
    ):
        check(wanted, mine, text)
    other.unlink()
    assert check(wanted, mine, text) == {"base", "classify", "more"}


def test_a_base_that_was_made_again_is_another_one(mine: Path, quiet: Path, text: str) -> None:
    store = Store(str(mine / "base/checkpoints"))
    found = dataclasses.replace(store.manifest(4), created="2100-01-01T00:00:00+00:00")
    (mine / "base/checkpoints/step-00000004/manifest.json").write_bytes(found.to_bytes())
    with pytest.raises(
        InputError,
        match=r"stages.classify: .*began with the commit of base at step 4, but that checkpoint has changed",
    ):
        check(document(text), mine, text)
    shutil.rmtree(mine / "base/checkpoints")  # to save space
    assert check(document(text), mine, text) == {"base", "classify", "more"}


def test_a_base_that_will_not_fit_is_refused_before_it_is_trained(tmp_path: Path, text: str) -> None:
    for change, wanted in (
        ({"changes": {"hidden": 64}}, "stages.more: workload.init_from: .* has embedding_size 32"),
        ({"changes": {"layers": 3}}, "stages.more: workload.init_from: "),
        ({"model": "gpt-tinny"}, "stages.more: workload: unknown model"),
    ):
        document_ = document(text)
        document_["stages"][2]["workload"] |= change
        with pytest.raises(InputError, match=wanted):
            check(document_, tmp_path / "c", text)
    document_ = document(text)
    document_["stages"][1]["data"]["labels"] = ["one"]
    with pytest.raises(InputError, match=r"stages.classify: data.labels: "):
        check(document_, tmp_path / "c", text)
    assert not (tmp_path / "c").exists()


def test_the_merged_export_of_an_adapter_is_a_base_to_come(tmp_path: Path, text: str) -> None:
    wanted = document(text)
    adapted = {"init_from": "stage:base", "adapter": {"kind": "lora", "rank": 2}}
    wanted["stages"][1:] = [
        {"name": "adapted", "workload": adapted, "checkpoint": {"export": "hf"}},
        {"name": "more", "workload": {"init_from": "stage:adapted"}},
    ]
    assert check(wanted, tmp_path / "c", text) == set()


def test_a_run_of_another_kind_is_no_chain(mine: Path, text: str) -> None:
    with pytest.raises(InputError, match="is the directory of a run, not a chain"):
        check(document(text), mine / "base", text)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """How a command ended, and what it printed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call([str(word) for word in words])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_commands_on_the_directory_of_a_chain_say_what_it_is(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ", ".join(str(mine / name) for name in ("base", "classify", "more"))
    chain = parse_chain(document("a.txt")).document()  # which the driver alone writes, as tests here do not
    (mine / "job.yaml").write_text(json.dumps(chain))
    for words in (
        ("evaluate", mine),
        ("verify-resume", mine),
        ("generate", mine, "hi"),
        ("checkpoint", "list", mine),
    ):
        code, out, err = said(capsys, *words)
        line = f"orchestrator: {mine}: is the directory of a chain, not of a run; name one of its stages: {stages}\n"
        assert (code, out, err) == (2, "", line)
    code, out, _ = said(capsys, "status", mine, "--json")
    assert (code, [stage["state"] for stage in json.loads(out)["stages"]]) == (0, ["done"] * 3)
    code, out, _ = said(capsys, "status", mine)
    assert code == 0
    assert "classify" in out
    (mine / "report.html").unlink()
    code, out, _ = said(capsys, "report", mine)
    assert (code, out) == (0, f"{mine}/report.html\n")
    assert (mine / "report.html").exists()
    code, _, err = said(capsys, "stop", mine)
    assert (code, err.endswith("no stage of this chain is running; see `orchestrator status`\n")) == (2, True)
