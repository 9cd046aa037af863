"""The packages of examples/extensions, installed outside this project's tree and found by their entry points."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import weights, write_text
from local_run import LocalGang, drive_here

from orchestrator.config.errors import InputError
from orchestrator.config.extensions import offered, with_extensions
from orchestrator.config.spec import parse
from orchestrator.export.converted import form_option
from orchestrator.export.hugging_face import export
from orchestrator.launch.preflight import preflight
from orchestrator.storage.run_directory import RunDir

EXAMPLES = Path(__file__).parents[2] / "examples" / "extensions"
PACKAGES = sorted(path.name for path in EXAMPLES.iterdir() if (path / "pyproject.toml").exists())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder into which all of them are installed, on Python's path."""
    folder = tmp_path_factory.mktemp("extensions")
    sources = folder / "sources"
    shutil.copytree(EXAMPLES, sources)  # building writes beside the source
    site = folder / "site"
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += [
        "--python",
        sys.executable,
        "--target",
        str(site),
        *(str(sources / name) for name in PACKAGES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site


def run(document: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The summary of a run with two workers, and its rows."""
    summary = drive_here(document, str(folder), folder.parent / "cache", gang=lambda: LocalGang([2]))
    return summary, list(RunDir(str(folder)).rows("metrics.jsonl"))


def test_each_package_offers_what_its_name_says(site: Path) -> None:
    outside = {
        kind: {name: found for name, found in each.items() if not found.startswith("orchestrator.")}
        for kind, each in offered().items()
    }
    assert outside == {
        "costs": {},
        "metrics": {},
        "models": {"wave_gru": "waves:WaveGRU"},
        "objectives": {"second_half": "second_half:SecondHalf"},
        "optimizers": {"sign_sgd": "sign_sgd:SignSGD"},
        "samples": {"waves": "waves:Waves"},
        "schedules": {},
        "sinks": {"csv": "csv_sink:CsvSink"},
    }


def test_an_optimizer_an_objective_and_a_sink_take_part_in_a_run(site: Path, tmp_path: Path) -> None:
    losses = tmp_path / "losses.csv"
    document = {
        "name": "extended",
        "workload": {"model": "gpt-tiny", "objective": "ext:second_half"},
        "data": {
            "sources": [{"uri": write_text(tmp_path / "corpus", 40_000)}],
            "tokenizer": {"train_bpe": 512},
            "sequence_length": 32,
        },
        "train": {
            "steps": 12,
            "global_batch": 8,
            "optimizer": {"name": {"use": "ext:sign_sgd", "options": {"momentum": 0.8}}, "lr": 0.001},
        },
        "sinks": {"own": [{"use": "ext:csv", "options": {"path": str(losses)}}]},
        "checkpoint": {"every": 6, "export": None},
        "resources": {"workers": {"min": 2, "max": 2}, "per_worker": {"cpu": 1}},
    }
    spec = parse(document)
    assert spec.workload.objective == "second_half:SecondHalf"
    assert str(spec.train.optimizer.name) == "sign_sgd:SignSGD"
    preflight(spec, RunDir(str(tmp_path / "run")), None, None)
    summary, rows = run(document, tmp_path / "run")
    assert summary["state"] == "done"
    assert rows[-1]["loss"] < rows[0]["loss"]
    with losses.open(newline="") as file:
        written = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert written == [(row["step"], row["loss"]) for row in rows]
    with pytest.raises(InputError, match=r"there is no 'q8_0'; use f32, f16"):
        form_option("npz", None, "q8_0")
    export(str(tmp_path / "run"), 12, str(tmp_path / "npz"), form=form_option("npz", None, "f16"))
    stored = np.load(tmp_path / "npz" / "model.npz")
    trained = weights(tmp_path / "run", 12)
    table = stored["transformer.wte.weight"]
    wanted = np.frombuffer(trained["model.tokens.weight"], np.float32).reshape(table.shape)
    assert np.array_equal(table, wanted.astype(np.float16))


def test_an_export_form_and_a_command_are_found(site: Path, tmp_path: Path) -> None:
    """By a program that starts with the packages installed."""
    np.savez(tmp_path / "model.npz", a=np.zeros((2, 3)))
    code = "from orchestrator.cli.app import call\ncall()"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    said = []
    for words in (["checkpoint", "list-npz", str(tmp_path / "model.npz")], ["schema", "checkpoint.export"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, timeout=60
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == "a 2x3\n"
    assert "dcp, gguf, npz, onnx" in said[1]


def test_a_model_family_trains_on_a_data_source(site: Path, tmp_path: Path) -> None:
    document = {
        "name": "waves",
        "workload": {"model": "ext:wave_gru", "changes": {"width": 16}},
        "data": {"samples": {"use": "ext:waves", "options": {"count": 256}}},
        "train": {"steps": 20, "global_batch": 16, "optimizer": {"lr": 0.01, "schedule": "constant"}},
        "checkpoint": {"every": 10, "export": None},
        "resources": {"workers": {"min": 2, "max": 2}, "per_worker": {"cpu": 1}},
    }
    preflight(parse(document), RunDir(str(tmp_path / "run")), None, None)
    summary, rows = run(document, tmp_path / "run")
    assert summary["state"] == "done"
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]


def test_a_file_system_is_found_as_fsspec_finds_it(site: Path, tmp_path: Path) -> None:
    """In a process of its own: fsspec reads entry points when it is imported."""
    size = Path(write_text(tmp_path / "corpus", 10_000)).stat().st_size
    code = (
        "from orchestrator.data.config import Source\n"
        "from orchestrator.data import sources\n"
        "from orchestrator.storage.run_directory import RunDir\n"
        "files = sources.resolve([Source(uri='team://corpus/*.txt')])\n"
        "run = RunDir('team://runs/a')\n"
        "run.create()\n"
        "run.write_json('status.json', {'step': 3})\n"
        "print(sum(file.plain_size for file in files), run.read_json_or_empty('status.json'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "TEAM_STORAGE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.split(maxsplit=1) == [str(size), "{'step': 3}\n"], done.stderr
    assert (tmp_path / "runs" / "a" / "status.json").is_file()


def test_a_name_that_nobody_offers_is_refused_with_the_nearest(site: Path) -> None:
    for name, hint in (("sing_sgd", "did you mean sign_sgd"), ("x", "they offer sign_sgd")):
        with pytest.raises(InputError, match=rf"no installed package offers {name} in .*optimizers.*{hint}"):
            with_extensions({"train": {"optimizer": {"name": f"ext:{name}"}}})
    document = {"train": {"optimizer": {"name": "adamw"}}, "sinks": None, "workload": "?"}
    assert with_extensions(document) is document
