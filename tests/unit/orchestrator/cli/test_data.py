"""data inspect and corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_prepared_data_is_looked_at(command: Any, runs: Path) -> None:
    (data,) = (runs / "runs" / "_data").iterdir()
    said = command("data", "inspect", data, "--json")
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert found["vocabulary"] == 512
    assert f"vocabulary: {found['vocabulary']}" in command("data", "inspect", data).out.splitlines()


def test_a_corpus_is_collected(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "orchestrator.data.corpus.collect", lambda folder: {"bytes": 2**20, "files": [folder]}
    )
    assert command("data", "corpus", "texts").out == "texts: 1.0 MiB of documentation strings in 1 files\n"
    assert json.loads(command("data", "corpus", "texts", "--json").out)["files"] == [f"{tmp_path}/texts"]
