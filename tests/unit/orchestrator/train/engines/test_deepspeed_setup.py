"""What the DeepSpeed engine is legal with, in words, and what it tells before it compiles."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.train.engines.deepspeed_library import compile_once
from orchestrator.train.engines.deepspeed_setup import BUCKET, settings
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
    chosen = plan(demand_of(job(gpu=gpu, micro_batch=2, **asked)), shape(), 4, MACHINE).chosen.layout
    assert chosen == Layout(dp=4, micro_batch=2, engine="deepspeed", **asked)
    assert str(chosen).startswith("dp4 deepspeed")


@pytest.mark.parametrize(
    ("asked", "train", "words"),
    [
        ({}, {}, "shards at least optimiser state; set zero to 1, 2 or 3, or engine to torch"),
        ({"zero": 1, "pp": 2}, {}, "is data parallel only, but pp is 2; set pp to 1, or engine to torch"),
        ({"zero": 1, "tp": 2}, {}, "but tp is 2; set tp to 1"),
        ({"zero": 1, "cp": 2}, {}, "but cp is 2; set cp to 1"),
        ({"zero": 2, "offload": "parameters"}, {}, "set zero to 3, or offload to optimizer"),
        ({"zero": 2, "offload": "optimizer"}, {}, "workers have no GPU; set offload to none"),
        ({"zero": 2, "recompute": "selective"}, {}, "set recompute to full or none"),
        ({"zero": 3}, {"compile": True}, "set train.compile to false"),
        ({"zero": 1}, {"optimizer": {"name": "lion"}}, "runs adamw, but the optimizer is lion"),
        ({"zero": 1}, {"determinism": "bitwise"}, "set train.determinism to rerun, or parallel.engine to torch"),
        ({"engine": "torch", "zero": 3, "offload": "parameters"}, {}, "is DeepSpeed's alone; set engine to deepspeed"),
    ],
)  # fmt: skip
def test_what_cannot_stand_together_is_refused_in_words(
    asked: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        plan(demand_of(job(train, **asked)), shape(), 4, MACHINE)


def test_the_nearest_legal_layouts_are_of_the_same_engine() -> None:
    with pytest.raises(InputError, match="the nearest legal layouts are dp4 deepspeed zero1"):
        plan(demand_of(job()), shape(), 4, MACHINE)


def test_the_batch_and_clipping_are_those_of_the_job() -> None:
    layout = Layout(dp=2, micro_batch=2, zero=2, engine="deepspeed")
    found = settings(
        (asked := job({"optimizer": {"clip": None}}, zero=2)).train,
        asked.resources.per_worker.gpu,
        layout,
        1000,
        32,
    )
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (16, 4)
    assert found["gradient_clipping"] == 0.0
    clipped = job({"optimizer": {"clip": 0.3}}, zero=2)
    found = settings(clipped.train, clipped.resources.per_worker.gpu, layout, 1000, 32)
    assert found["gradient_clipping"] == 0.3


def test_buffers_are_no_larger_than_the_model_needs() -> None:
    layout = Layout(zero=2, engine="deepspeed")
    assert (
        settings((asked := job(zero=2)).train, asked.resources.per_worker.gpu, layout, 1000, 32)[
            "zero_optimization"
        ]["reduce_bucket_size"]
        == 1000
    )
    assert (
        settings((asked := job(zero=2)).train, asked.resources.per_worker.gpu, layout, 10**10, 32)[
            "zero_optimization"
        ]["reduce_bucket_size"]
        == BUCKET
    )


def test_offload_says_which_part_goes_to_the_host() -> None:
    layout = Layout(zero=3, engine="deepspeed", offload="parameters")
    zero = settings((asked := job(zero=3)).train, asked.resources.per_worker.gpu, layout, 1000, 32)[
        "zero_optimization"
    ]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    zero = settings(
        (asked := job(zero=3)).train,
        asked.resources.per_worker.gpu,
        Layout(zero=3, engine="deepspeed"),
        1000,
        32,
    )["zero_optimization"]
    assert "offload_param" not in zero
    assert "offload_optimizer" not in zero


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an operator `small`, on a machine that has a compiler."""
    for tool in ("c++", "ninja"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    return tmp_path / "built" / "small"


def test_a_missing_compiler_is_told_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(
        InputError, match=r"has no c\+\+ and no ninja; install g\+\+ and ninja, or set offload to none"
    ):
        compile_once("cpu_adam", lambda: None)


def test_a_first_compilation_is_announced_and_no_other(built: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compile_once("small", (built / "small.so").touch)
        assert f"compiling DeepSpeed's small in {built}" in caplog.text
        caplog.clear()
        compile_once("small", lambda: None)
    assert not caplog.records


def test_a_compilation_that_fails_is_told_in_one_line(built: Path) -> None:
    def load() -> None:
        raise RuntimeError("Error building\nfatal error: Python.h: No such file or directory\nninja: stopped")

    with pytest.raises(
        InputError, match=r"small does not compile in .*: fatal error: Python\.h: No such file"
    ) as found:
        compile_once("small", load)
    assert "\n" not in str(found.value)


COMPILE_SLOWLY = """
import time
from orchestrator.train.engines.deepspeed_library import compile_once
compile_once("small", lambda: (print("began", flush=True), time.sleep(60)))
"""


@pytest.mark.slow
def test_a_killed_compilation_holds_nobody_up(built: Path) -> None:
    command = [sys.executable, "-c", COMPILE_SLOWLY]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        (built / "lock").touch()  # as PyTorch would have made it
        process.kill()
    done: list[bool] = []
    compile_once("small", lambda: done.append((built / "lock").exists()))
    assert done == [False]


WITHOUT_NVCC = """
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
assert get_accelerator().device_name() == "cuda"
assert not issubclass(CPUAdamBuilder, CUDAOpBuilder)
builder = CPUAdamBuilder()
print(*builder.sources(), *builder.include_paths())
"""


@pytest.mark.slow
def test_offload_of_a_model_on_a_gpu_compiles_nothing_for_it() -> None:
    """The image has g++ and no nvcc."""
    environment = {**os.environ, "DS_ACCELERATOR": "cuda"}
    words = [sys.executable, "-c", WITHOUT_NVCC]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()[-1].split()
    assert "csrc/adam/cpu_adam.cpp" in names
    assert not [name for name in names if name.endswith(".cu") or "cuda" in name]
