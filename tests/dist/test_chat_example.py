"""The small version of `make example-chat` and `make example-preferences`: the same job files, of fewer steps and less
text."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import rows, write_text
from local_run import drive_here

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 40


def small(name: str, place: Path, **changes: Any) -> dict[str, Any]:
    """The job of an example, with the paths of `place`."""
    document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    document["workload"]["changes"] = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128}
    if base := document["workload"].get("init_from"):
        document["workload"]["init_from"] = str(place / base)
    document["data"] |= changes
    document["train"] |= {"steps": STEPS, "global_batch": 16}
    document["train"]["optimizer"] |= {"warmup": 4, "lr": 3e-3 if name != "preferences" else 3e-4}
    document["parallel"] = {"micro_batch": 8}
    document["checkpoint"] = {"every": STEPS, "export": None}
    if "evaluate" in document:
        document["evaluate"] |= {"tasks": [], "every": STEPS, "at_start": True}
    return document


@pytest.mark.slow
def test_a_model_learns_to_answer_and_then_which_answer_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("chat", EXAMPLES / "chat.py")
    assert spec
    assert spec.loader
    chat = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chat)
    chat.PACKAGES = ("networkx",)
    chat.main("chat", 60)
    os.symlink(EXAMPLES, "examples")
    text = {"sources": [{"uri": write_text(tmp_path / "corpus")}], "tokenizer": {"train_bpe": 1024}}
    drive_here(small("chat_pretrain", tmp_path, **text), "runs/chat-pretrain", tmp_path / "cache")
    (made,) = (tmp_path / "cache").glob("*/tokenizer.json")
    found = {}
    for name in ("chat", "preferences"):
        run = "chat" if name == "chat" else "chat-preferences"
        drive_here(small(name, tmp_path, tokenizer=str(made)), f"runs/{run}", tmp_path / "cache")
        found[name] = [row["sets"]["test"] for row in rows(tmp_path / "runs" / run, "evals.jsonl")]
    said = found["chat"]
    assert said[-1]["loss"] < said[0]["loss"] - 1
    assert found["preferences"][0]["reward_margin"] == pytest.approx(0, abs=1e-3)  # it is the reference still
    compared = rows(tmp_path / "runs/chat-preferences")  # its few pairs that are held out tell nothing
    assert compared[-1]["loss"] < compared[0]["loss"] - 0.1
    assert compared[-1]["accuracy"] > 0.6
    assert compared[-1]["reward_margin"] > 0.1
