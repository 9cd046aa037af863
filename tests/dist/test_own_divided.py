"""The guide to own models that are divided: under tensor and pipeline parallelism as in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, write_text
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.export.hugging_face import export
from orchestrator.export.own_model import load_own
from orchestrator.storage.run_directory import RunDir

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-layouts.md"


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "small_gpt", raising=False)
    found = re.search(r'```python title="small_gpt.py"\n(.*?)```', GUIDE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "small_gpt.py").write_text(found.group(1))
    document = job(write_text(tmp_path / "corpus", 20_000), steps=6)
    document["workload"] = {"model": "small_gpt:Gpt", "objective": "causal_lm"}
    document["data"] |= {"validation": {"share": 0.2}, "tokenizer": {"train_bpe": 301}}
    document["train"]["optimizer"] |= {"eps": 1e-4}
    document |= {"evaluate": {"every": 3}, "checkpoint": {"every": 2, "export": None}}
    document.pop("tracking", None)
    return document


def run(
    document: dict[str, Any], folder: Path, parallel: dict[str, Any], faults: tuple[str, ...] = ()
) -> tuple[list[Any], dict[str, torch.Tensor], list[Any]]:
    """Rows, weights and optimiser state, and evaluations of a run."""
    workers = parallel.pop("workers")
    resources = {"workers": {"min": workers, "max": workers}}
    changed = document | {"parallel": parallel, "resources": resources}
    gang = lambda: LocalGang([workers])  # noqa: E731
    summary = drive_here(changed, str(folder), folder.parent / "cache", gang=gang, faults=faults)
    assert summary["state"] == "done"
    store = Store(str(folder / "checkpoints"))
    reader = store.reader(manifest := store.manifest(6))
    place = RunDir(str(folder))
    state = {name: reader.read(name) for name in manifest.tensors}
    return place.rows("metrics.jsonl"), state, [row["sets"] for row in place.rows("evals.jsonl")]


TWO = {"workers": {"min": 2, "max": 2}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"workers": 2, "tp": 2, "micro_batch": 4},
    "pp2": {"workers": 2, "pp": 2, "micro_batch": 2},
    "dp2 zero2": {"workers": 2, "zero": 2, "micro_batch": 1},
    "dp2 zero3": {"workers": 2, "zero": 3, "micro_batch": 1},
    "tp2 dp2": {"workers": 4, "tp": 2, "micro_batch": 2, "zero": 3, "recompute": "full"},
    "pp2 zero1": {"workers": 4, "pp": 2, "zero": 1, "micro_batch": 2},
    "pp2 tp2 zbv": {"workers": 4, "pp": 2, "tp": 2, "schedule": "zbv", "micro_batch": 2},
}


def check(document: dict[str, Any], folder: Path, names: list[str]) -> None:
    alone, one, evaluated = run(document, folder / "alone", {"workers": 1, "micro_batch": 8})
    assert alone[-1]["loss"] < alone[0]["loss"]
    for name in names:
        rows, two, found = run(document, folder / name.replace(" ", "-"), dict(LAYOUTS[name]))
        assert [row["samples"] for row in rows] == [row["samples"] for row in alone]
        for ours, theirs in zip(rows, alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), name
        assert two.keys() == one.keys()
        worst = {n: float((one[n].float() - two[n].float()).abs().max()) for n in one}
        assert max(worst.values()) < 1e-5, (name, max(worst, key=worst.__getitem__))
        for ours, theirs in zip(found, evaluated, strict=True):
            assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-5)


@pytest.mark.slow
def test_tensors_and_stages_are_divided_as_in_one_process(document: dict[str, Any], tmp_path: Path) -> None:
    check(document, tmp_path, ["tp2", "pp2"])


RARE = """
        x = x + self.down(F.gelu(self.up(self.after(x))))
        here = batch["tokens"] == 285
        return x + self.rare(x) * here.unsqueeze(-1) if here.any() else x
"""


@pytest.mark.slow
def test_a_part_that_few_samples_reach_is_summed_over_ranks_as_in_one_process(
    document: dict[str, Any], tmp_path: Path
) -> None:
    """Neither of the first samples reaches it, so that it is not refused, and in no step do all ranks."""
    code = (tmp_path / "small_gpt.py").read_text()
    code = code.replace("        return x + self.down(F.gelu(self.up(self.after(x))))\n", RARE.lstrip("\n"))
    code = code.replace(
        "        self.after =", "        self.rare = nn.Linear(width, width)\n        self.after ="
    )
    # of a name of its own: the server that ranks are forked by may have begun where another test has that module
    (tmp_path / "rare_gpt.py").write_text(code)
    document["workload"]["model"] = "rare_gpt:Gpt"
    check(document, tmp_path, ["dp2 zero2", "dp2 zero3"])


@pytest.mark.slow
def test_more_layouts(document: dict[str, Any], tmp_path: Path) -> None:
    check(document, tmp_path, list(LAYOUTS)[4:])


@pytest.mark.slow
def test_an_adapter_beside_the_weights_of_another_run(document: dict[str, Any], tmp_path: Path) -> None:
    run(document, tmp_path / "base", {"workers": 1, "micro_batch": 8})
    document["workload"] |= {
        "init_from": str(tmp_path / "base"),
        "adapter": {"kind": "dora", "rank": 2, "targets": ["*.query", "*.out", "*.down"]},
    }
    check(document, tmp_path, ["tp2", "pp2"])
    state = run(document, tmp_path / "whole", {"workers": 1, "micro_batch": 8})[1]
    assert not any(name.endswith("up.weight") for name in state)
    assert any(name.endswith("down.lora_b.weight") for name in state)
    found = export(str(tmp_path / "whole"), 6, str(tmp_path / "export"))
    assert found["logits_difference"] is None
    module: Any = load_own(tmp_path / "export")
    place = Store(str(tmp_path / "base" / "checkpoints"))
    before = place.reader(place.manifest(6))
    assert torch.equal(module.begin.table.weight, before.read("model.network.begin.table.weight"))
    moved = module.layers[0].query.weight - before.read("model.network.layers.0.query.weight")
    assert float(moved.detach().abs().max()) > 1e-4
    document["workload"] |= {"changes": {"depth": 2}}
    with pytest.raises(InputError, match=r"which this model lacks|is missing"):
        run(document, tmp_path / "unlike", {"workers": 1, "micro_batch": 8})


IMAGES = """
import numpy as np, torch
from torch import nn

class Images:
    def __len__(self): return 24
    def sample(self, number, rng):
        image = np.sin(np.arange(64).reshape(1, 8, 8) * (number % 3 + 1) / 5)
        return {"image": image + 0.1 * rng.standard_normal((1, 8, 8)), "kind": number % 3}

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
    def forward(self, batch): return self.conv(batch["image"]), batch["image"] * self.conv.bias[0]
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4)
    def forward(self, hidden, batch):
        x, image = hidden
        return torch.relu(self.norm(self.conv(x))), nn.functional.avg_pool2d(image, 2)
class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(20, 3)
    def forward(self, hidden, batch):
        logits = self.out(torch.cat([each.flatten(1) for each in hidden], 1))
        return nn.functional.cross_entropy(logits, batch["kind"], reduction="none")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([First(), Half(), Half(), Last()])
    def blocks(self): return self.parts[1:3]
    def stages(self): return list(self.parts)
"""


ODD = """
import torch
from torch import nn

class Points:
    def __len__(self): return 24
    def sample(self, number, rng): return {"x": rng.standard_normal(6), "y": number % 3 / 2}
class First(nn.Module):
    def __init__(self): super().__init__(); self.up, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(2.0))
    def forward(self, batch): return (self.up(batch["x"]) * self.scale).t().contiguous().t()
class Layer(nn.Module):
    def __init__(self): super().__init__(); self.inner = nn.Linear(6, 6)
    def forward(self, x, batch): return (x + torch.tanh(self.inner(x))).unflatten(-1, (2, 3)).flatten(-2)
class Last(nn.Module):
    def __init__(self): super().__init__(); self.out = nn.Linear(6, 1)
    def forward(self, x, batch): x += 1.0; return (self.out(x)[:, 0] - batch["y"]).square()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.two, self.last = First(), Layer(), Layer(), Last()
        self.unused = self.last.unused = nn.Linear(2, 2)
        self.two.inner.weight = self.first.up.weight
    def blocks(self): return [self.one, self.two, self.one]
    def stages(self): return [self.first, self.one, self.two, self.one, self.last]
"""


def test_scalars_shared_and_unused_weights_and_a_layer_used_twice(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "own_odd", raising=False)
    (tmp_path / "own_odd.py").write_text(ODD)
    document["workload"] = {"model": "own_odd:Net"}
    document["data"] = {"samples": "own_odd:Points"}
    del document["evaluate"]
    _, one, _ = run(document, tmp_path / "alone", {"workers": 1, "micro_batch": 8})
    for name, parallel in (
        ("zero", {"workers": 2, "zero": 3, "micro_batch": 2}),
        ("pp", {"workers": 2, "pp": 2, "micro_batch": 2}),
    ):
        _, two, _ = run(document, tmp_path / name, parallel)
        assert max(float((one[n].float() - two[n].float()).abs().max()) for n in one) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_of_several_tensors_of_other_shapes(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.delitem(sys.modules, "own_images", raising=False)
    (tmp_path / "own_images.py").write_text(IMAGES)
    document["workload"] = {"model": "own_images:Net"}
    document["data"] = {"samples": "own_images:Images", "validation": {"share": 0.2}}
    document["train"] |= {"precision": precision}
    _, one, evaluated = run(document, tmp_path / "alone", {"workers": 1, "micro_batch": 2})
    for schedule in ("1f1b", "interleaved"):
        parallel = {"workers": 2, "pp": 2, "micro_batch": 2, "schedule": schedule, "recompute": "full"}
        _, two, found = run(document, tmp_path / schedule, parallel)
        assert max(float((one[n].float() - two[n].float()).abs().max()) for n in one) < 1e-5
        assert [row["validation"]["loss"] for row in found] == pytest.approx(
            [row["validation"]["loss"] for row in evaluated], rel=1e-5
        )


@pytest.mark.slow
def test_a_run_goes_on_from_another_under_another_layout(document: dict[str, Any], tmp_path: Path) -> None:
    _, whole, _ = run(document, tmp_path / "whole", {"workers": 1, "micro_batch": 8})
    document["train"]["steps"] = 4
    drive_here(document | {"parallel": {"tp": 2, "micro_batch": 4}, "resources": TWO}, str(tmp_path / "first"),
               tmp_path / "cache", gang=lambda: LocalGang([2]))  # fmt: skip
    document["train"] |= {"steps": 6, "continue_from": f"{tmp_path / 'first'}@2"}
    _, found, _ = run(document, tmp_path / "second", dict(LAYOUTS["pp2"]))
    assert max(float((whole[n].float() - found[n].float()).abs().max()) for n in whole) < 1e-5
    code = tmp_path / "small_gpt.py"
    code.write_text(code.read_text() + "CHANGED = True\n")
    with pytest.raises(
        InputError, match=r"the code of small_gpt:Gpt has changed since the run began.* accept_code"
    ):
        run(document, tmp_path / "third", dict(LAYOUTS["pp2"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2 dp2", "pp2 zero1"])
def test_a_kill_changes_no_bit(document: dict[str, Any], tmp_path: Path, name: str) -> None:
    _, quiet, _ = run(document, tmp_path / "quiet", dict(LAYOUTS[name]))
    _, killed, _ = run(document, tmp_path / "killed", dict(LAYOUTS[name]), ("kill@1:5",))
    assert all(torch.equal(quiet[n], killed[n]) for n in quiet)
