"""data inspect and corpus."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_job
from prepared import prepare_here

from orchestrator.job.spec import load

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
    monkeypatch.setattr("cluster.local.ray_session.connected_ray", lambda address: contextlib.nullcontext())
    found = json.loads(command("data", "prepare", path, "--json").out)
    held_out = found["held_out"]["validation"]
    assert found["data"] == uri
    assert held_out == json.loads(command("data", "inspect", uri, "--share", "0.3", "--json").out)["held_out"]
    assert found["held_out"]["same"]["documents"] == 60
    assert found["notes"] == [
        f"{60 - held_out['documents']} of the 60 documents of the set same are in the training text too"
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
