"""A planner cost of the user's own changes which layout is chosen, and a wrong one is refused in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_code, code_of
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.launch.job_checks import check_job
from orchestrator.parallel.layout import Layout
from orchestrator.planner.choose_layout import Plan, plan, predict
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load
from orchestrator.planner.own_cost import check_own_cost
from orchestrator.planner.planner import Planner
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import describe

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "own-components.md").read_text()
CODE = """
import itertools
calls = itertools.count()

def sharded(layout, step, memory, **options): return 3.0 if layout.zero < 2 else 0.0
def slow_pipeline(layout, step, memory): return 100.0 * (layout.pp - 1)
def no_tensor(layout, step, memory): return "racks are\\n apart" if layout.tp > 1 else 0
def nothing(layout, step, memory): return "no layout is good enough"
def negative(layout, step, memory): return -1.0
def endless(layout, step, memory): return float("inf")
def boolean(layout, step, memory): return True
def empty(layout, step, memory): return " "
def none(layout, step, memory): return None
def fails(layout, step, memory): return {1: 0.0}[layout.world]
def counts(layout, step, memory): return float(next(calls))
some = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with costs, whose module's name no other test has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    name = f"costs_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(CODE)
    return tmp_path / f"{name}.py"


def job(parallel: Any = "auto", workers: int = 8, gpu: int = 1) -> JobSpec:
    return parse(
        {
            "name": "cases",
            "workload": {"model": "llama-3-8b" if gpu else "gpt-tiny"},
            "data": {
                "sources": [{"uri": "a.txt"}],
                "tokenizer": {"train_bpe": 512},
                "sequence_length": 2048 if gpu else 32,
            },
            "train": {"steps": 100, "global_batch": 64, "precision": "bf16" if gpu else "fp32"},
            "resources": {"workers": {"min": 1, "max": workers}, "per_worker": {"gpu": gpu}},
            "checkpoint": {"export": None},
            "parallel": parallel,
        }
    )


def planned(parallel: Any = "auto", workers: int = 8) -> Plan:
    return plan(
        demand_of(job(parallel, workers)), model_shape(describe("llama-3-8b"), 2048), workers, machine()
    )


def machine() -> Machine:
    return load("h100").machine("bf16")


def own(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    return {"rest": "auto", "cost": {"use": f"{folder.stem}:{name}", "options": options}}


def test_added_seconds_change_the_choice_and_are_told(folder: Path) -> None:
    plain, costed = planned(), planned(own(folder, "slow_pipeline"))
    assert plain.chosen.layout.pp > 1
    assert costed.chosen.layout.pp == 1
    assert costed.to_json()["predicted"]["seconds_by_part"]["own"] == 0.0
    spec = job(own(folder, "slow_pipeline"))
    found = predict(
        demand_of(spec), model_shape(describe("llama-3-8b"), 2048), plain.chosen.layout, machine()
    )
    assert found.time.own == 100.0 * (plain.chosen.layout.pp - 1)
    assert found.seconds == pytest.approx(plain.chosen.seconds + found.time.own)


def test_the_search_finds_what_is_best_with_the_seconds_added(folder: Path) -> None:
    """The layout that an unpruned comparison of all that were predicted would choose."""
    costed = planned(own(folder, "sharded"))
    assert costed.chosen.layout.zero >= 2
    assert costed.chosen.time.own == 0.0
    assert all(c.time.own == (3.0 if c.layout.zero < 2 else 0.0) for c in costed.candidates)
    assert costed.chosen.seconds == pytest.approx(min(c.seconds for c in costed.candidates), rel=0.05)


def test_a_refused_layout_is_rejected_with_the_reason(folder: Path) -> None:
    refused = planned(own(folder, "no_tensor"))
    assert all(c.layout.tp == 1 for c in refused.candidates)
    reasons = {reason for layout, reason in refused.rejected if layout.tp > 1}
    assert f"racks are apart (by {folder.stem}:no_tensor)" in reasons
    with pytest.raises(InputError, match=r"no legal layout .*: no layout is good enough \(by "):
        planned(own(folder, "nothing"))
    with pytest.raises(InputError, match="racks are apart"):
        planned({"tp": 8, "cost": f"{folder.stem}:no_tensor"})
    spec = job(own(folder, "nothing"))
    assert Planner(demand_of(spec), model_shape(describe("llama-3-8b"), 2048), machine()).choose(8) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("negative", r"returns '-1.0' for .* neither seconds from 0 on nor a reason"),
        ("endless", "returns 'inf'"),
        ("boolean", "returns 'True'"),
        ("empty", "returns ' '"),
        ("none", "returns 'None'"),
        ("fails", "failed on .*KeyError"),
        ("counts", "returns different results for the same arguments"),
        ("some", "'int' object is not callable"),
        ("absent", "has no absent"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(folder: Path, name: str, message: str) -> None:
    spec = job(own(folder, name), workers=2, gpu=0)
    with pytest.raises(InputError, match=message) as error:
        check_job(spec)
    assert error.value.where == "parallel.cost"
    assert "\n" not in str(error.value)


def test_its_code_is_part_of_the_run(folder: Path) -> None:
    spec = job(own(folder, "sharded"))
    before = code_of(spec.own_code)
    assert list(before) == [f"{folder.stem}:sharded"]
    folder.write_text(CODE + "\n# another\n")
    with pytest.raises(InputError, match=r"the code of .*:sharded has changed since the run began"):
        check_same_code(spec.own_code, spec.accept_code, before, "runs/a")


def test_a_job_file_reads_the_same_again(folder: Path) -> None:
    for parallel in (own(folder, "sharded", a=1), {"tp": 2, "cost": f"{folder.stem}:sharded"}, {"tp": 2}):
        spec = job(parallel)
        assert parse(yaml.safe_load(dump(spec))) == spec
    assert "  cost:" not in dump(job({"tp": 2}))
    assert "cost" not in yaml.safe_dump(spec.parallel.pins)  # type: ignore[union-attr]


def test_the_guide(tmp_path: Path) -> None:
    """The example of the page, as it stands."""
    code, parallel = (
        re.search(rf'```\w+ title="{title}"\n(.*?)```', GUIDE, re.DOTALL)
        for title in (r"our_site\.py", "parallel")
    )
    assert code is not None
    assert parallel is not None
    (tmp_path / "site_of_guide.py").write_text(code[1])
    given = yaml.safe_load(parallel[1].replace("our_site:", "site_of_guide:"))["parallel"]
    roomy = {"per_rack": 1, "most_memory": 1e12}
    assert given["cost"]["options"] == {"per_rack": 1}
    spec = job({**given, "cost": {**given["cost"], "options": roomy}}, workers=2)
    check_own_cost(spec.parallel, 2)
    found = predict(
        demand_of(spec), model_shape(describe("llama-3-8b"), 2048), Layout(dp=2, zero=3), machine()
    )
    assert found.time.own == found.time.communication > 0.0
    few = job({**given, "cost": {**given["cost"], "options": {"most_memory": 1e9}}}, workers=2)
    with pytest.raises(InputError, match=r"it needs \d+ GB, and 1 GB are ours \(by site_of_guide:cost\)"):
        plan(demand_of(few), model_shape(describe("llama-3-8b"), 2048), 2, machine())
