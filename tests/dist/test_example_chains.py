"""The chains in examples/: every stage passes preflight, and at a small size they run to their ends."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import write_text
from local_chain import drive_chain_here

from orchestrator.chain.preflight import check_chain
from orchestrator.chain.stage_run import stage_runs
from orchestrator.config.chain import parse_chain
from orchestrator.config.document import read_document
from orchestrator.storage.run_directory import RunDir

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = ("deepspeed", "networkx", "pandas", "scipy", "numpy", "sympy", "sqlalchemy", "torch")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small corpus, where the examples look for it, and what the script makes of that."""
    monkeypatch.chdir(tmp_path)
    text = Path(write_text(tmp_path / "text", 60_000)).read_text()
    (tmp_path / "corpus").mkdir()
    size = len(text) // len(PACKAGES)
    body = " It says what the function does, of which arguments, and what it returns or raises." * 3
    for number, name in enumerate(PACKAGES):
        made = [f"f(x)\n\nThe {name} function number {n}.\n\nNumber {n}.{body}" for n in range(40)]
        documents = [text[number * size : (number + 1) * size], *made]
        (tmp_path / "corpus" / f"{name}.txt").write_text("\n<|endoftext|>\n".join(documents))
    found = importlib.util.spec_from_file_location("summarise", EXAMPLES / "summarise.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.main()
    shutil.copytree(EXAMPLES / "tasks", tmp_path / "examples" / "tasks")
    return tmp_path


def small(name: str, here: Path) -> dict[str, Any]:
    """The example with a tiny model and a few steps, and with absolute paths."""
    document = read_document(EXAMPLES / name)
    document["workload"]["changes"] = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
    document["data"] |= {"tokenizer": {"train_bpe": 512}, "sequence_length": 64}
    if "validation" in document["data"]:
        document["data"]["validation"] = {"share": 0.3}
    document |= {"tracking": None, "parallel": {"micro_batch": 4}}
    document["train"] |= {"steps": 2, "global_batch": 8}
    document["train"]["optimizer"]["warmup"] = 0
    for stage in document["stages"]:
        stage["train"] = {**stage.get("train", {}), "steps": 2}
        stage["checkpoint"] = {"every": 2, "export": None}
        if "tasks" in stage.get("evaluate", {}):
            stage["evaluate"] = {**stage["evaluate"], "tasks": []}  # they are evaluated with Ray
    return parse_chain(document).with_paths(here).document()


@pytest.mark.parametrize("name", ["chain.yaml", "summarise.yaml", "distill.yaml"])
def test_every_stage_passes_preflight(name: str, here: Path) -> None:
    chain = parse_chain(read_document(EXAMPLES / name)).with_paths(here)
    root = RunDir(str(here / "runs" / chain.name))
    assert check_chain(chain, stage_runs(chain, root), root, None) == set()
    assert not (here / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain.yaml", "summarise.yaml", "distill.yaml"])
def test_it_runs_at_a_small_size(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = small(name, here)
    document["data"] = {}
    for stage in document["stages"]:
        stage["data"]["cache"] = str(here / "cache")
    ended = drive_chain_here(document, here / "runs" / "c", here / "cache", monkeypatch)
    assert ended.line == ""
    assert {stage["state"] for stage in ended.summary["stages"]} == {"done"}
