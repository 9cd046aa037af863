"""DeepSpeed as a library: importing it for a device and an existing process group, and its configuration."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from orchestrator.config.errors import InputError
from orchestrator.config.optimizer import OptimizerSpec
from orchestrator.config.spec import JobSpec
from orchestrator.optim.optimizers import Rate, groups_of
from orchestrator.parallel.layout import Layout

log = logging.getLogger(__name__)

BUCKET = 50_000_000
"""Most elements whose gradients are reduced at once."""


def open_deepspeed(device: torch.device) -> ModuleType:
    """The library, set up for that device and for the existing process group.

    Raises InputError if it is not installed.
    """
    # DeepSpeed reads both on import and on initialisation; without them it looks for a launcher or MPI
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except ImportError as error:
        raise InputError(
            f"DeepSpeed cannot be imported ({error})",
            "parallel.engine",
            "install deepspeed, or set engine to torch",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # it calls deprecated collectives of torch, which would print a warning on every rank
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # its shared-memory all-reduce is for inference only, and takes minutes to compile
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def settings(spec: JobSpec, layout: Layout, elements: int, hidden: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of `elements` parameters and width `hidden`; all settings whose defaults
    differ from the torch engine are given."""
    train = spec.train
    zero: dict[str, Any] = {
        "stage": layout.zero,
        "overlap_comm": False,
        "contiguous_gradients": True,
        # the bucket is allocated in full; the default takes 2 GB even for the smallest model
        "reduce_bucket_size": min(elements, BUCKET),
        # under ZeRO 3 vectors are kept on every rank, and matrices are gathered when they are used
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    host = {"device": "cpu", "pin_memory": bool(spec.resources.per_worker.gpu)}
    if layout.offload != "none":
        zero["offload_optimizer"] = host
    if layout.offload == "parameters":
        zero["offload_param"] = host
    return {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation(train.global_batch),
        "gradient_clipping": train.optimizer.clip or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }


def optimizer_of(
    spec: OptimizerSpec, parameters: Iterable[tuple[nn.Parameter, bool, Rate]], offload: bool
) -> torch.optim.Optimizer:
    """AdamW over the full parameters, as of `groups_of`; DeepSpeed replaces them by its partitions.

    With offload it is DeepSpeed's AdamW for CPUs (Ren et al., 2021, section 5).
    """
    groups = groups_of(spec, parameters)
    if not offload:
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    compile_once("cpu_adam", CPUAdamBuilder().load)
    return DeepSpeedCPUAdam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, adamw_mode=True)


def compile_once(operator: str, load: Callable[[], object]) -> None:
    """Load an operator of DeepSpeed, which compiles it on first use; one process per machine compiles, the others wait.

    A killed compilation blocks nobody, since the kernel releases its lock.
    Raises InputError if there is no compiler, or if compiling fails.
    """
    where, hint = "parallel.offload", "or set offload to none"
    if shutil.which("ninja") is None:  # installed with DeepSpeed, beside a Python that is not on PATH
        os.environ["PATH"] = os.pathsep.join(
            [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        )
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        absent = " and no ".join(missing)
        raise InputError(
            f"offload compiles DeepSpeed's {operator}, and this machine has no {absent}",
            where,
            f"install {' and '.join('g++' if tool == 'c++' else tool for tool in missing)}, {hint}",
        )
    # on import, builds of torch with CUDA ask for GPUs, which fork servers that import this module must not
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(operator, verbose=False))
    with open(folder / "in-use", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # PyTorch's own lock is a file that stays when its process is killed, and would be waited for without end
        (folder / "lock").unlink(missing_ok=True)
        if not (folder / f"{operator}.so").exists():
            log.warning("compiling DeepSpeed's %s in %s: about two minutes, once a machine", operator, folder)
        try:
            load()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            why = next((line for line in lines if "error:" in line), lines[-1])
            raise InputError(
                f"DeepSpeed's {operator} does not compile in {folder}: {why.strip()}",
                where,
                f"fix the compiler, {hint}",
            ) from error
