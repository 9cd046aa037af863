"""What the DeepSpeed engine is legal with, in words, and what it tells before it compiles."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.layout import Layout, ModelShape
from orchestrator.plan import Machine, model_shape, plan
from orchestrator.spec import JobSpec, parse
from orchestrator.train.deepspeed_setup import compile_once, settings
from workloads.describe import describe

MACHINE = Machine(16e9, 1e11)


def job(train: dict[str, Any] | None = None, gpu: int = 0, **parallel: Any) -> JobSpec:
    return parse({
        "name": "a",
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "x"}], "tokenizer": "t", "sequence_length": 128},
        "train": {"steps": 10, "global_batch": 16, **(train or {})},
        "parallel": {"engine": "deepspeed", **parallel},
        "resources": {"workers": 4, "per_worker": {"gpu": gpu}},
    })  # fmt: skip


def shape() -> ModelShape:
    return model_shape(describe("gpt-tiny", {}, 4096), 128)


@pytest.mark.parametrize(
    ("asked", "gpu"),
    [
        ({"zero": 1}, 0),
        ({"zero": 2}, 0),
        ({"zero": 3, "recompute": "full"}, 0),
        ({"zero": 1, "offload": "optimizer"}, 1),
        ({"zero": 3, "offload": "parameters"}, 1),
    ],
)
def test_a_legal_layout_is_taken_whole(asked: dict[str, Any], gpu: int) -> None:
    chosen = plan(job(gpu=gpu, micro_batch=2, **asked), shape(), 4, MACHINE).chosen.layout
    assert chosen == Layout(dp=4, micro_batch=2, engine="deepspeed", **asked)
    assert str(chosen).startswith("dp4 deepspeed")


@pytest.mark.parametrize(
    ("asked", "train", "words"),
    [
        ({}, {}, "shards at least optimiser state; set zero to 1, 2 or 3, or engine to torch"),
        ({"zero": 1, "pp": 2}, {}, "is data parallel only, and pp is 2; set pp to 1, or engine to torch"),
        ({"zero": 1, "tp": 2}, {}, "and tp is 2; set tp to 1"),
        ({"zero": 1, "cp": 2}, {}, "and cp is 2; set cp to 1"),
        ({"zero": 2, "offload": "parameters"}, {}, "set zero to 3, or offload to optimizer"),
        ({"zero": 2, "offload": "optimizer"}, {}, "workers have none; set offload to none"),
        ({"zero": 2, "recompute": "selective"}, {}, "set recompute to full or none"),
        ({"zero": 3}, {"compile": True}, "set train.compile to false"),
        ({"zero": 1}, {"optimizer": {"name": "lion"}}, "runs adamw, and the optimizer is lion"),
        ({"zero": 1}, {"determinism": "bitwise"}, "set train.determinism to rerun, or parallel.engine to torch"),
        ({"engine": "torch", "zero": 3, "offload": "parameters"}, {}, "is DeepSpeed's alone; set engine to deepspeed"),
    ],
)  # fmt: skip
def test_what_cannot_stand_together_is_refused_in_words(
    asked: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        plan(job(train, **asked), shape(), 4, MACHINE)


def test_the_nearest_legal_layouts_are_of_the_same_engine() -> None:
    with pytest.raises(InputError, match="the nearest legal layouts are dp4 deepspeed zero1"):
        plan(job(), shape(), 4, MACHINE)


def test_the_batch_and_clipping_are_those_of_the_job() -> None:
    layout = Layout(dp=2, micro_batch=2, zero=2, engine="deepspeed")
    found = settings(job({"optimizer": {"clip": None}}, zero=2), layout)
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (16, 4)
    assert found["gradient_clipping"] == 0.0
    assert settings(job({"optimizer": {"clip": 0.3}}, zero=2), layout)["gradient_clipping"] == 0.3


def test_offload_says_which_part_goes_to_the_host() -> None:
    layout = Layout(zero=3, engine="deepspeed", offload="parameters")
    zero = settings(job(zero=3), layout)["zero_optimization"]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    zero = settings(job(zero=3), Layout(zero=3, engine="deepspeed"))["zero_optimization"]
    assert "offload_param" not in zero
    assert "offload_optimizer" not in zero


def test_a_missing_compiler_is_told_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputError, match=r"no g\+\+ and no ninja; install what is missing, or set offload to none"
    ):
        compile_once("cpu_adam")


def test_a_first_compilation_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for tool in ("g++", "ninja"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    with caplog.at_level(logging.WARNING):
        compile_once("cpu_adam")
        assert f"compiling DeepSpeed's cpu_adam under {tmp_path / 'built'}" in caplog.text
        caplog.clear()
        (tmp_path / "built" / "cpu_adam").mkdir(parents=True)
        (tmp_path / "built" / "cpu_adam" / "cpu_adam.so").touch()
        compile_once("cpu_adam")
    assert not caplog.records
