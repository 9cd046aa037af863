"""A job's other formats are refused before it runs, in a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.export.converted import Conversion, check_packages, form_of
from orchestrator.export.kinds import form_named
from orchestrator.launch.job_checks import check_job

PAIR = {"objective": "replaced_token_detection"}


def test_the_keys_are_those_of_the_command() -> None:
    assert form_of(CheckpointSpec(export="gguf", export_numbers="q8_0")) == Conversion("gguf", "hf", "q8_0")
    assert form_of(CheckpointSpec(export="dcp", export_names="olmo")) == Conversion("dcp", "olmo")
    assert form_of(CheckpointSpec(export="onnx")) == Conversion("onnx")
    assert [form_of(CheckpointSpec(export=form)) for form in ("hf", None)] == ["hf", None]


@pytest.mark.parametrize(
    ("workload", "checkpoint", "wanted"),
    [
        ({"model": "llama-tiny"}, {"export": "dcp", "export_names": "torchtitan"}, ""),
        ({"model": "llama-tiny"}, {"export": "gguf"}, ""),
        ({"model": "bert-tiny", "objective": "masked_lm"}, {"export": "onnx"}, ""),
        ({"model": "gpt-tiny"}, {"export": "dcp", "export_names": "olmo"}, "names of olmo are known for"),
        ({"model": "gpt-tiny"}, {"export": "gguf"}, "GGUF export supports language models of"),
        ({"model": "llama-tiny"}, {"export": "onnx"}, "ONNX export supports single encoders"),
        ({"model": "electra-tiny", **PAIR}, {"export": "onnx"}, "ONNX export supports single encoders"),
        (
            {"model": "electra-tiny", **PAIR},
            {"export": "dcp"},
            "a generator and its discriminator have no common names",
        ),
        ({"model": "llama-tiny"}, {"export": "hf", "export_names": "olmo"}, "export_names is for export dcp"),
        (
            {"model": "llama-tiny"},
            {"export": "dcp", "export_numbers": "f16"},
            "export_numbers is for export gguf",
        ),
        (
            {"model": "llama-tiny"},
            {"export": None, "export_to": "/x"},
            "leave out export_to, or set export to hf",
        ),
        ({"model": "llama-tiny"}, {"export": None, "export_at": "commit"}, "leave out export_at"),
    ],
)
def test_what_a_format_has_not_is_told_before_the_run(
    workload: dict[str, Any],
    checkpoint: dict[str, Any],
    wanted: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("To be or not to be. " * 2000)
    data = {
        "sources": [{"uri": str(tmp_path / "a.txt")}],
        "tokenizer": {"train_bpe": 320},
        "sequence_length": 32,
    }
    document = {
        "name": "form", "workload": {"objective": "causal_lm", **workload}, "data": data,
        "train": {"steps": 2, "global_batch": 4}, "checkpoint": checkpoint,
    }  # fmt: skip
    if not wanted:
        check_job(parse(document))
        return
    with pytest.raises(InputError, match=wanted) as error:
        check_job(parse(document))
    assert "checkpoint" in str(error.value).split(wanted)[0]


def test_a_package_that_is_not_there_is_told_in_a_line() -> None:
    without = replace(form_named("gguf"), packages=("no-such-package",))
    with pytest.raises(InputError) as error:
        check_packages(without, "checkpoint.export")
    assert str(error.value) == (
        "checkpoint.export: needs no-such-package, which is not installed; pip install -e '.[gguf]' in the checkout"
    )


def test_what_is_registered_is_for_transformers() -> None:
    with pytest.raises(InputError, match="MLflow has no model in gguf"):
        parse(
            {
                "name": "form", "workload": {"model": "llama-tiny", "objective": "causal_lm"},
                "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 320}, "sequence_length": 32},
                "train": {"steps": 2, "global_batch": 4}, "checkpoint": {"export": "gguf"},
                "tracking": {"uri": "sqlite:///x.db", "register_as": "demo"},
            }
        )  # fmt: skip
