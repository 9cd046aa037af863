"""The guide to own code: its model is trained, under several layouts and through kills, and leaves."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jobs import write_text
from local_run import LocalGang, drive_here
from safetensors.torch import load_file

from orchestrator import load_run
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.export.hugging_face import export
from orchestrator.launch.preflight import preflight
from orchestrator.storage.run_directory import RunDir

FOLDER = Path(__file__).parents[2] / "docs" / "guides"
GUIDES = "".join((FOLDER / page).read_text() for page in ("own-code.md", "own-components.md"))


def of_guide(name: str) -> str:
    """The file of that name in the guides."""
    found = re.search(rf'```\w+ title="{re.escape(name)}"\n(.*?)```', GUIDES, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The guide's job, shortened, in a working directory with the guide's code."""
    code = of_guide("diffusion.py")
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    (tmp_path / "diffusion.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "diffusion", raising=False)
    found: dict[str, Any] = yaml.safe_load(of_guide("job.yaml"))
    found["train"]["steps"], found["train"]["global_batch"] = 12, 8
    found["train"]["optimizer"] |= {"eps": 1e-4, "warmup": 2}
    found["checkpoint"] |= {"every": 4, "export": None}
    found["evaluate"]["every"] = 6
    found["data"]["validation"]["share"] = 0.02
    return found


def test_an_objective_a_metric_an_optimiser_and_a_schedule_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under two workers as under one."""
    (tmp_path / "ours.py").write_text(of_guide("ours.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    document: dict[str, Any] = yaml.safe_load(of_guide("ours.yaml"))
    document["data"]["sources"][0]["uri"] = write_text(tmp_path / "corpus", 40_000)
    document["train"]["steps"], document["evaluate"]["every"], document["checkpoint"] = (
        12,
        6,
        {"every": 12, "export": None},
    )
    found = [run(document, tmp_path / str(workers), workers) for workers in (1, 2)]
    for summary, rows in found:
        assert summary["state"] == "done"
        assert [row["lr"] for row in rows[::4]] == pytest.approx([0.1, 0.05, 0.025])
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
        assert 0 < summary["evaluation"]["sets"]["validation"]["ours:top5"] < 1
    alone, both = ([row["loss"] for row in rows] for _, rows in found)
    assert both == pytest.approx(alone, rel=1e-5)


def run(
    document: dict[str, Any], folder: Path, workers: int = 2, **changes: Any
) -> tuple[dict[str, Any], list[Any]]:
    """The summary of a run, and its rows."""
    summary = drive_here(
        {**document, **{k: v for k, v in changes.items() if k != "faults"}},
        str(folder),
        folder.parent / "cache",
        gang=lambda: LocalGang([workers]),
        faults=changes.get("faults", ()),
    )
    return summary, list(RunDir(str(folder)).rows("metrics.jsonl"))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The model of a commit."""
    store = Store(str(folder / "checkpoints"))
    manifest = store.manifest(step)
    reader = store.reader(manifest)
    return {name: reader.read(name) for name in manifest.tensors if name.startswith("model.")}


def test_it_trains_leaves_and_its_code_is_part_of_the_run(document: dict[str, Any], tmp_path: Path) -> None:
    spec = parse(document | {"checkpoint": {"every": 4, "export": "safetensors"}})
    preflight(spec, RunDir(str(tmp_path / "run")), None, None)
    summary, rows = run(document, tmp_path / "run")
    assert summary["state"] == "done"
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "psnr" in rows[-1]
    assert set(summary["evaluation"]["sets"]["validation"]) == {"loss", "psnr", "tokens"}

    found = export(str(tmp_path / "run"), 12, str(tmp_path / "export"))
    assert found["logits_difference"] is None
    written = load_file(tmp_path / "export" / "model.safetensors")
    about = json.loads((tmp_path / "export" / "own.json").read_text())
    assert "layers.0.first.weight" in written
    assert about["model"] == "diffusion:Denoiser"
    kept = weights(tmp_path / "run", 12)
    assert torch.equal(written["begin.weight"], kept["model.network.begin.weight"])

    ran = load_run(tmp_path / "run")
    model: Any = ran.model()
    assert len(model.layers) == 2
    assert torch.equal(model.begin.weight, written["begin.weight"])
    assert list(ran.metrics().index) == list(range(1, 13))
    assert list(ran.commits().index) == [4, 8, 12]
    assert list(ran.evaluations()["validation.psnr"].index) == [6, 12]
    assert (ran.state, ran.wait(1.0).summary["state"], ran.job.name) == ("done", "done", "digits")
    assert "train" in set(ran.events()["phase"])

    (tmp_path / "diffusion.py").write_text(of_guide("diffusion.py") + "\nCHANGED = True\n")
    with pytest.raises(
        InputError,
        match=r"the code of diffusion:Denoiser has changed since the run began.* accept_code: \[(\w+)\]",
    ) as e:
        preflight(spec, RunDir(str(tmp_path / "run")), None, None)
    hashes = re.findall(r"\[(\w{32})\]", str(e.value))
    preflight(parse(document | {"accept_code": hashes}), RunDir(str(tmp_path / "run")), None, None)
    with pytest.raises(InputError, match="the code of diffusion:Denoiser"):
        export(str(tmp_path / "run"), 12, str(tmp_path / "again"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"micro_batch": 2},
        {"zero": 1, "micro_batch": 4},
        {"zero": 2, "micro_batch": 2, "recompute": "full"},
        {"zero": 3, "micro_batch": 2},
    ],
    ids=str,
)
def test_every_layout_is_as_one_process(
    document: dict[str, Any], tmp_path: Path, parallel: dict[str, Any]
) -> None:
    _, alone = run(document, tmp_path / "alone", 1, resources={"workers": {"min": 1, "max": 1}})
    _, rows = run(document, tmp_path / "run", 2, parallel=parallel)
    assert [row["samples"] for row in rows] == [row["samples"] for row in alone]
    for ours, theirs in zip(rows, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    one, two = weights(tmp_path / "alone", 12), weights(tmp_path / "run", 12)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.slow
def test_kills_change_no_bit(document: dict[str, Any], tmp_path: Path) -> None:
    parallel = {"zero": 2, "micro_batch": 2}
    run(document, tmp_path / "quiet", parallel=parallel)
    summary, _ = run(
        document, tmp_path / "run", parallel=parallel, faults=("kill@1:3", "kill@0:7/2", "kill@1:10/3")
    )
    assert summary["state"] == "done"
    assert len(summary["faults"]) == 3
    one, two = weights(tmp_path / "quiet", 12), weights(tmp_path / "run", 12)
    assert all(torch.equal(one[name], two[name]) for name in one)
    receipts = [
        list(RunDir(str(tmp_path / n)).rows("metrics.jsonl"))[-1]["samples"] for n in ("quiet", "run")
    ]
    assert receipts[0] == receipts[1]
