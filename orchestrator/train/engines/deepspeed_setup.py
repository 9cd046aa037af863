"""DeepSpeed as a library: imported for our device, inside our process group, with settings equal to our engine's."""

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
from torch.utils.cpp_extension import _get_build_directory

from orchestrator.job.errors import InputError
from orchestrator.job.spec import JobSpec, OptimizerSpec
from orchestrator.planning.layout import Layout
from orchestrator.train.engines.optimizers import groups_of

log = logging.getLogger(__name__)

BUCKET = 50_000_000
"""Elements whose gradients are reduced at once."""


def open_deepspeed(device: torch.device) -> ModuleType:
    """The library, set to that device and to the process group that is there already.

    Raises InputError if it is not installed.
    """
    # DeepSpeed reads both on import and on initialisation, and would otherwise look for a launcher or for MPI.
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
    # Of the collectives it calls, which are torch's older ones: a line of every rank, again and again.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Its all-reduce through shared memory serves inference alone, and would take minutes to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def settings(spec: JobSpec, layout: Layout, elements: int, hidden: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of so many parameters and that width: all that has a default which
    differs from ours is said."""
    train = spec.train
    zero: dict[str, Any] = {
        "stage": layout.zero,
        "overlap_comm": False,
        "contiguous_gradients": True,
        # It is allocated whole, and by default is 2 GB for the smallest model.
        "reduce_bucket_size": min(elements, BUCKET),
        # Under ZeRO 3 vectors stay whole on every rank, and matrices are fetched when they are used.
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
    spec: OptimizerSpec, parameters: Iterable[tuple[nn.Parameter, float]], offload: bool
) -> torch.optim.Optimizer:
    """AdamW over whole parameters, each with its `lr_scale`, which DeepSpeed replaces by its partitions.

    Where the state is in host memory it is DeepSpeed's own for processors (Ren et al., 2021, section 5).
    """
    # Partitioned parameters are empty, and say their shape otherwise.
    groups = groups_of(
        spec, ((p, len(getattr(p, "ds_shape", p.shape)) > 1, scale) for p, scale in parameters)
    )
    if not offload:
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    compile_once("cpu_adam", CPUAdamBuilder().load)
    return DeepSpeedCPUAdam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, adamw_mode=True)


def compile_once(operator: str, load: Callable[[], object]) -> None:
    """Load an operator of DeepSpeed, which compiles it where nobody has; one process of a machine for all.

    A compilation that was killed holds nobody up: the kernel lets go of its lock.
    Raises InputError if there is no compiler, or if it fails.
    """
    where, hint = "parallel.offload", "or set offload to none"
    if shutil.which("ninja") is None:  # it came with DeepSpeed, beside a Python that nobody activated
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
    folder = Path(_get_build_directory(operator, verbose=False))
    with open(folder / "in-use", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # PyTorch's own lock is a file, which stays behind a killed process and would be waited for without end.
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
