"""What an export does to a commit: transformers agrees with it, nothing is unpickled, nothing else is overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import job, write_text
from prepared import prepare_here

from cluster.gang import Bundle
from cluster.process_gang import ProcessGang
from orchestrator.errors import InputError
from orchestrator.export import check_target
from orchestrator.layout import Layout
from orchestrator.spec import dump, parse
from orchestrator.train.task import ENTRY, Task

AUDITED = """
import json, sys
from orchestrator.export import export

def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickles {arguments}")

import transformers, torch  # what they do at import is theirs
sys.addaudithook(refuse)
print(json.dumps(export(sys.argv[1], 2, sys.argv[2])))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a commit at step 2, made by the rank program."""
    folder = tmp_path_factory.mktemp("run")
    spec = parse(job(write_text(folder / "corpus"), steps=2, optimizer={"warmup": 0}))
    data = prepare_here(spec, str(folder / "_data"))
    (folder / "job.yaml").write_text(dump(spec))
    task = Task(spec.model_dump(mode="json"), Layout(micro_batch=8).to_json(), str(folder), data, 1, None, 2, token="t")
    _train(task.to_json())
    return folder


def _train(task: dict[str, Any]) -> None:
    gang = ProcessGang()
    deadline = time.monotonic() + 120
    try:
        gang.start(1, Bundle(), ENTRY, task)
        while (rank := gang.poll(0).ranks[0]).state in ("starting", "running"):
            assert time.monotonic() < deadline, "the rank is not done after 120 s"
            time.sleep(0.05)
        assert rank.state == "done", rank.error
    finally:
        gang.close()


def test_an_export_unpickles_nothing_and_agrees(run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", AUDITED, str(run), str(tmp_path / "export")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logits_difference"] < 1e-4
    assert {"config.json", "model.safetensors", "tokenizer.json", "export.json"} <= {
        path.name for path in (tmp_path / "export").iterdir()
    }


def test_a_folder_that_is_no_export_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="holds something that is no export; give a new folder"):
        check_target(str(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "precious"
