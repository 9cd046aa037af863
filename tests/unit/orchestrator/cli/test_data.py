"""data inspect and corpus."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_job
from letters import letters, write_tokenizer
from prepared import prepare_here

from orchestrator.config.spec import load

SOME = "\n<|endoftext|>\n".join(
    f"Document {number} tells of {number * number} things." * 3 for number in range(60)
)


def test_prepared_data_is_looked_at(command: Any, runs: Path) -> None:
    (data,) = (runs / "runs" / "_data").iterdir()
    said = command("data", "inspect", data, "--json")
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert found["vocabulary"] == 512
    assert f"vocabulary: {found['vocabulary']}" in command("data", "inspect", data).out.splitlines()


def test_a_name_of_a_file_or_folder_here_and_of_a_run_is_refused(
    command: Any, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it took, the user might have meant the other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(runs / "runs")
    assert command("data", "inspect", "half", "--json").code == 0
    (tmp_path / "small").mkdir()
    (tmp_path / "half").write_text((runs / "half.yaml").read_text())
    for name, kind in (("small", "folder"), ("half", "file")):
        said = command("data", "inspect", name)
        line = f"{name}: is the name of a {kind} here and of a run in runs; write ./{name} or runs/{name}"
        assert (said.code, said.out, said.err) == (2, "", f"orchestrator: {line}\n")
    assert json.loads(command("data", "inspect", "runs/half", "--json").out)["name"] == "half"


def test_what_a_share_would_hold_out_is_shown(command: Any, runs: Path) -> None:
    (data,) = (runs / "runs" / "_data").iterdir()
    found = json.loads(command("data", "inspect", data, "--share", "0.5", "--json").out)
    assert 0 < found["held_out"]["documents"] < found["documents"]
    said = command("data", "inspect", data, "--share", "0")
    assert (said.code, said.out) == (2, "")
    assert f"0 holds out none of {found['documents']} documents; make it at least 0." in said.err


def test_preparing_tells_what_is_held_out(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(SOME)
    document = job(str(tmp_path / "text.txt"))
    document["data"] |= {"validation": {"share": 0.3}, "cache": str(tmp_path / "cache")}
    document["evaluate"] = {"sets": {"same": {"sources": [{"uri": str(tmp_path / "text.txt")}]}}}
    path = write_job(tmp_path, document)
    uri = prepare_here(load(path), str(tmp_path / "cache"))
    found = json.loads(command("data", "prepare", path, "--json").out)
    held_out = found["held_out"]["validation"]
    assert found["data"] == uri
    assert held_out == json.loads(command("data", "inspect", uri, "--share", "0.3", "--json").out)["held_out"]
    assert found["held_out"]["same"]["documents"] == 60
    assert found["notes"] == [
        f"{60 - held_out['documents']} of the 60 documents of the set same are also in the training text"
    ]
    assert command("data", "prepare", path).out.splitlines() == [
        uri,
        "held out as validation: " + ", ".join(f"{held_out[key]} {key}" for key in held_out),
        f"held out as same: 60 documents, {found['held_out']['same']['tokens']} tokens, "
        f"{found['held_out']['same']['bytes']} bytes",
        *found["notes"],
    ]


def test_a_corpus_is_collected(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "orchestrator.data.corpus.collect", lambda folder: {"bytes": 2**20, "files": [folder]}
    )
    assert command("data", "corpus", "texts").out == "texts: 1.0 MiB of documentation strings in 1 files\n"
    assert json.loads(command("data", "corpus", "texts", "--json").out)["files"] == [f"{tmp_path}/texts"]


@pytest.fixture
def looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> Any:
    """A job with these keys, its data prepared, given to `data inspect`."""

    def look(workload: dict[str, Any], data: dict[str, Any], *arguments: Any, **train: Any) -> Any:
        (tmp_path / "text.txt").write_text(SOME)
        document = job(str(tmp_path / "text.txt"), **train)
        document["data"] |= {"cache": str(tmp_path / "cache"), **data}
        document["workload"] = {**workload}
        path = write_job(tmp_path, document)
        prepare_here(load(path), str(tmp_path / "cache"))
        return command("data", "inspect", path, *arguments)

    return look


def test_a_packed_sample_is_shown_as_the_model_sees_it(looked_at: Any) -> None:
    workload = {"model": "gpt-tiny", "options": {"documents": "isolate"}}
    said = looked_at(workload, {"packing": "best_fit", "sequence_length": 64}, "--at", "3", "--json")
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert 0 < found["padding"] < 1
    assert (found["documents"], found["cut"], found["cut_though_short"]) == (60, 0, 0)
    stream = json.loads(looked_at(workload, {"sequence_length": 64}, "--json").out)
    assert stream["documents"] == 60
    assert 10 < stream["cut"] == stream["cut_though_short"] < 50
    whole = json.loads(
        looked_at(workload, {"sequence_length": 64}, "--set", "data.packing=best_fit", "--json").out
    )
    assert (whole["cut"], whole["padding"]) == (found["cut"], found["padding"])
    [sample] = found["samples"]
    assert (sample["position"], sample["step"], sample["turn"]) == (3, 1, 0)
    tokens = sample["rows"][0]["tokens"]["tokens"]
    assert len(tokens) == 64
    assert sum(spot.get("begins", False) for spot in tokens if not spot.get("padding")) >= len(
        sample["pieces"]
    )
    for before, spot in itertools.pairwise(tokens):
        if not spot.get("padding"):
            assert spot["sees"] == (1 if spot.get("begins") else before["sees"] + 1)
        if "label" in before:
            assert before["label"] == spot["token"]
    assert not any("label" in spot for spot in tokens if spot.get("padding"))
    text = looked_at(
        workload, {"packing": "best_fit", "sequence_length": 64}, "--at", "3", "--count", "2", steps=30
    ).out
    assert text.count("Document") >= 2
    assert " ‖ " in text
    assert "of padding]" in text
    assert "passes by the end; more than 4 passes teach little" in text


def test_masks_and_rows_of_a_warmup_are_shown(looked_at: Any) -> None:
    masked = looked_at({"model": "bert-tiny", "objective": "masked_lm"}, {}, "--sample", "2", "--turn", "1")
    assert masked.code == 0, masked.err
    assert "→" in masked.out
    assert "sample 2 of source 0, turn 1" in masked.out
    train = {"sequence_warmup": {"length": 8, "steps": 6}}
    rows = looked_at({"model": "gpt-tiny"}, {}, "--at", "0", "--json", **train)
    assert [len(row["tokens"]["tokens"]) for row in json.loads(rows.out)["samples"][0]["rows"]] == [8] * 4


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        ("roberta-tiny", "whole_word_masking"), ("bert-tiny", "next_sentence"),
        ("electra-tiny", "replaced_token_detection"),
        ("t5-tiny", "span_corruption"), ("bart-tiny", "denoising"), ("unilm-tiny", "unified_lm"),
        ("glm-tiny", "blank_infilling"),
    ],
)  # fmt: skip
def test_every_kind_of_objective_can_be_looked_at(looked_at: Any, model: str, objective: str) -> None:
    said = looked_at({"model": model, "objective": objective}, {}, "--at", "1")
    assert said.code == 0, said.err
    assert "position 1, step 1" in said.out


def test_a_sample_that_is_not_there_is_refused(looked_at: Any, runs: Path, command: Any) -> None:
    said = looked_at({"model": "gpt-tiny"}, {}, "--sample", "100000")
    assert said.code == 2
    assert "no sample has the id 100000" in said.err
    for option, value in (("--share", "0.5"), ("--turn", "1"), ("--count", "2")):
        said = looked_at({"model": "gpt-tiny"}, {}, option, value)
        assert said.code == 2
        assert f"{option} does nothing here" in said.err
    (data,) = (runs / "runs" / "_data").iterdir()
    said = command("data", "inspect", data, "--at", "1")
    assert said.code == 2
    assert "this is prepared data; name a job file or a run directory" in said.err
    said = command("data", "inspect", runs / "nowhere", "--count", "2")
    assert "there is no prepared data" in said.err
    said = command("data", "inspect", runs / "runs" / "half", "--removed-by", "c4", "--count", "2")
    assert "--count does nothing here; it does not go with --removed-by" in said.err


@pytest.mark.parametrize(
    ("objective", "columns", "shown"),
    [
        ("conversation", {"messages": "talk"}, " ‖ "),
        ("dpo", {"prompt": "asked", "chosen": "better", "rejected": "worse"}, "of padding]"),
        ("sequence_classification", {"text": "text", "label": "good"}, "sequence_labels: "),
    ],
)
def test_records_can_be_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Any,
    objective: str,
    columns: dict[str, str],
    shown: str,
) -> None:
    rows = [
        {
            "asked": [{"role": "user", "content": letters(n)}],
            "better": [{"role": "assistant", "content": letters(n + 1)}],
            "worse": [{"role": "assistant", "content": letters(n + 2)}],
            "talk": [
                {"role": "user", "content": letters(n)},
                {"role": "assistant", "content": letters(n + 1)},
            ],
            "text": letters(n),
            "good": "yes" if n % 2 else "no",
        }
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(tmp_path)
    document = job(str(tmp_path / "rows.jsonl"))
    document["workload"]["objective"] = objective
    document["data"] = {
        "sources": [{"uri": str(tmp_path / "rows.jsonl"), "field": columns}],
        "tokenizer": str(tmp_path),
        "sequence_length": 48,
        "labels": ["no", "yes"] if objective.startswith("sequence") else [],
        "cache": str(tmp_path / "cache"),
    }
    path = write_job(tmp_path, document)
    prepare_here(load(path), str(tmp_path / "cache"))
    said = command("data", "inspect", path, "--at", "2")
    assert said.code == 0, said.err
    assert shown in said.out


def test_a_run_directory_can_be_looked_at(runs: Path, command: Any) -> None:
    run = runs / "runs" / "half"
    found = json.loads(command("data", "inspect", run, "--at", "9", "--count", "2", "--json").out)
    assert [(sample["position"], sample["step"]) for sample in found["samples"]] == [(9, 2), (10, 2)]
    assert found["sources"][0]["drawn"] == 96
