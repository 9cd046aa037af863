"""The page of a search, and its drawings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import spec
from orchestrator.config.errors import InputError
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.report import report

LR = "train.optimizer.lr"


def sweep_of(folder: Path, trials: list[tuple[str, int, float]]) -> RunDir:
    """A search whose trials have (state, last step, last loss)."""
    job: dict[str, Any] = {
        "name": "small",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
        "train": {"steps": 9, "global_batch": 8},
        "tune": {
            "space": {
                LR: {"loguniform": [1e-4, 1e-1]},
                "train.optimizer.name": {"choice": ["<adamw>", "lion"]},
            },
            "trials": 4,
            "window": 1,
        },
    }
    sweep = RunDir(str(folder))
    sweep.write_text("job.yaml", spec.dump(spec.parse(job)))
    found = []
    for number, (state, step, loss) in enumerate(trials):
        name = f"{number:04d}"
        config = {LR: 10.0 ** -(number + 1), "train.optimizer.name": ("<adamw>", "lion")[number % 2]}
        value = None if state == "failed" else loss
        found.append({"trial": name, "config": config, "state": state, "value": value, "step": step})
        found[-1] |= {"reason": "out of <memory>" if state == "failed" else "", "runs": [name], "steps": step}
        (folder / name).mkdir()
        row = {"attempt": 1, "time": 1.0, "step_seconds": 0.5}
        rows = [json.dumps({"step": s, "loss": loss + 9 - s, **row}) for s in range(1, step + 1)]
        (folder / name / "metrics.jsonl").write_text("\n".join(rows))
    best = min((t for t in found if t["state"] == "done"), key=lambda t: t["value"], default=None)
    head = {"name": "small", "metric": "loss", "mode": "min", "hours": 0.5, "steps": 20, "exploits": 0}
    sweep.write_json("sweep.json", head | {"best": best and {**best, "run": best["trial"]}, "trials": found})
    return sweep


def test_the_page_has_every_trial_two_charts_and_the_importance(tmp_path: Path) -> None:
    page = report(
        sweep_of(tmp_path, [("done", 9, 3.0), ("stopped", 3, 5.0), ("done", 9, 4.0), ("stopped", 3, 6.0)])
    )
    lines, curves = re.findall(r"<svg.*?</svg>", page, re.S)
    assert [re.findall(r'class="trial (\w+)"', drawing) for drawing in (lines, curves)] == [
        ["part", "part", "full", "best"]
    ] * 2
    assert ">Importance<" in page
    assert 'href="0003/report.html"' in page
    assert "at step 3, which" in page, "keys are compared where all trials have been"
    assert "<adamw>" not in page
    assert "http:" not in page
    assert "https:" not in page, "nothing is loaded from elsewhere"


def test_the_page_of_a_search_by_an_evaluation(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, [("done", 9, 3.0), ("stopped", 3, 5.0), ("done", 9, 4.0), ("stopped", 3, 6.0)])
    document = spec.load(tmp_path / "job.yaml").model_dump(mode="json")
    document["evaluate"], document["data"]["validation"] = {"every": 3}, {"share": 0.1}
    document["tune"]["metric"] = "validation.loss"
    sweep.write_text("job.yaml", spec.dump(spec.parse(document)))
    for folder in sorted(tmp_path.glob("000*")):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows[2::3]:
            row["evaluations"] = [{"step": row["step"], "sets": {"validation": {"loss": row["loss"] + 1.0}}}]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = report(sweep)
    assert len(re.findall(r"<svg.*?</svg>", page, re.S)) == 2
    assert "at step 3, which" in page


def test_a_search_whose_trials_all_failed_has_its_reasons(tmp_path: Path) -> None:
    page = report(sweep_of(tmp_path, [("failed", 0, 0.0), ("failed", 0, 0.0)]))
    assert "<svg" not in page
    assert page.count("out of &lt;memory&gt;") == 2


def test_where_there_is_no_search_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no search here"):
        report(RunDir(str(tmp_path)))


@pytest.mark.parametrize(
    ("metric", "told"), [("loss", "mean of the last 1 steps"), ("validation.loss", "the last evaluation")]
)
def test_the_page_says_what_the_best_value_is(tmp_path: Path, metric: str, told: str) -> None:
    sweep = sweep_of(tmp_path, [("done", 9, 3.0)])
    sweep.write_json("sweep.json", {**sweep.read_json_or_empty("sweep.json"), "metric": metric})
    assert f"at step 9 ({told})." in report(sweep)


def test_the_page_of_two_metrics_has_the_frontier(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, [("done", 9, 3.0), ("done", 9, 5.0), ("failed", 3, 4.0), ("done", 9, 6.0)])
    job = json.loads(json.dumps(spec.load(tmp_path / "job.yaml").document()))
    job["tune"]["metric"] = ["loss", "parameters"]
    (tmp_path / "job.yaml").write_text(spec.dump(spec.parse(job)))
    found = sweep.read_json("sweep.json")
    for trial, parameters in zip(found["trials"], (4e6, 1e5, None, 1e6), strict=True):
        trial["second"] = parameters
    sweep.write_json("sweep.json", found | {"second": "parameters", "frontier": ["0000", "0001"]})
    page = report(sweep)
    assert "On the frontier of loss and parameters: 0000, 0001." in page
    picture = next(each for each in re.findall(r"<svg.*?</svg>", page, re.S) if 'class="front"' in each)
    assert re.findall(r'class="point( on)?"[^>]*><title>(\w+)', picture) == [
        ("", "0003"),
        (" on", "0000"),
        (" on", "0001"),
    ]
    places = dict(re.findall(r'cx="([\d.]+)"[^>]*><title>(\w+)', picture))
    assert [name for _, name in sorted((float(x), name) for x, name in places.items())] == [
        "0001",
        "0003",
        "0000",
    ]
    assert '<th class="n">parameters</th>' in page
    assert '<td class="n">4,000,000</td>' in page
