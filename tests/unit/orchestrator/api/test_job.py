"""A job built in Python is the job of the file, and what is wrong with it is the same line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import orchestrator
from orchestrator import InputError, Job, load_run
from orchestrator.cli.options import existing_run
from orchestrator.optim.config import OptimizerSpec

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "python.md"


def of_guide(title: str) -> str:
    """The code of that title in the guide."""
    found = re.search(rf'```python title="{title}"\n(.*?)```', GUIDE.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"Job": dict}
    exec(of_guide("job"), names)
    found: dict[str, Any] = names["job"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(found))
    return found


def test_a_job_is_that_of_the_file(document: dict[str, Any]) -> None:
    job, read = Job(**document), Job.load("job.yaml")
    assert job == read
    assert job.identity == read.identity
    assert job.spec.data.sources[0].uri == str(Path.cwd() / "corpus/*.txt")
    assert Job(**yaml.safe_load(job.to_yaml())) == job
    assert Job.load("job.yaml", "train.steps=50").spec.train.steps == 50
    longer = job.changed(train__steps=24, train__optimizer=OptimizerSpec(lr=3e-5))
    assert (longer.spec.train.steps, longer.spec.train.optimizer.lr) == (24, 3e-5)
    assert job.spec.train.steps == 12


def test_what_is_wrong_is_the_same_line(document: dict[str, Any]) -> None:
    document["train"]["stepz"] = 3
    Path("job.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(InputError) as ours:
        Job(**document)
    with pytest.raises(InputError) as theirs:
        Job.load("job.yaml")
    assert str(ours.value) == str(theirs.value) == "job: train.stepz: unknown key; did you mean 'steps'?"


def test_a_job_is_checked_and_a_run_is_there(document: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"data\.sources\.0.*corpus"):
        Job(**document).check()
    with pytest.raises(InputError, match=r"/nothing and .*/runs/nothing: there is no run here"):
        load_run("nothing")


def test_a_bare_name_is_found_here_or_in_runs(document: dict[str, Any]) -> None:
    """A folder of that name without a run hides none."""

    def begin(place: str) -> str:
        Path(place).mkdir(parents=True)
        Path(place, "job.yaml").write_text(yaml.safe_dump(document))
        Path(place, "events.jsonl").touch()
        return str(Path(place).absolute())

    in_runs = begin("runs/small")
    assert load_run("small").uri == in_runs
    Path("small").mkdir()
    Path("small/job.yaml").write_text("name: a job of the user\n")
    assert load_run("small").uri == existing_run("small")[0].uri == in_runs
    shutil.rmtree("small")
    here = begin("small")
    assert load_run("small").uri == existing_run("small")[0].uri == here


def test_only_what_is_offered_is_there() -> None:
    assert {name for name in orchestrator.__all__ if getattr(orchestrator, name) is not None} >= {
        "run",
        "submit",
    }
    with pytest.raises(AttributeError, match="has no attribute 'train_all'"):
        orchestrator.train_all  # noqa: B018
