"""The DeepSpeed library: importing it, and compiling its operators."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from orchestrator.config.errors import InputError

log = logging.getLogger(__name__)


def open_deepspeed(device: torch.device) -> ModuleType:
    """Return the library, set up for a device and the existing process group.

    Raises InputError if it is not installed.
    """
    # DeepSpeed reads both variables on import and initialisation; without them it looks for a launcher or MPI
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
    # DeepSpeed calls deprecated collectives of torch, which would print a warning on every rank
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # the shared-memory all-reduce is for inference only, and takes minutes to compile
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def compile_once(operator: str, load: Callable[[], object]) -> None:
    """Load an operator of DeepSpeed, which compiles it on first use. One process per machine compiles, and the others
    wait.

    A killed compilation blocks no other process, because the kernel releases its lock.
    Raises InputError if there is no compiler, or if compiling fails.

    Args:
        operator: DeepSpeed's name of it.
        load: loads the operator, and compiles it if that is missing.

    Raises:
        InputError: no compiler is installed, or compiling fails.
    """
    where, hint = "parallel.offload", "or set offload to none"
    if shutil.which("ninja") is None:  # DeepSpeed installs ninja beside Python, which may not be on PATH
        os.environ["PATH"] = os.pathsep.join(
            [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        )
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        absent = " and no ".join(missing)
        raise InputError(
            f"offload compiles DeepSpeed's {operator}, but this machine has no {absent}",
            where,
            f"install {' and '.join('g++' if tool == 'c++' else tool for tool in missing)}, {hint}",
        )
    # on import, torch built with CUDA asks for GPUs, which fork servers that import this module must not do
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(operator, verbose=False))
    with open(folder / "in-use", "w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        # PyTorch's own lock is a file. It stays when its process is killed, and others would wait for it forever.
        (folder / "lock").unlink(missing_ok=True)
        if not (folder / f"{operator}.so").exists():
            log.warning("compiling DeepSpeed's %s in %s: about two minutes, once a machine", operator, folder)
        try:
            load()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            cause = next((line for line in lines if "error:" in line), lines[-1])
            raise InputError(
                f"DeepSpeed's {operator} does not compile in {folder}: {cause.strip()}",
                where,
                f"fix the compiler, {hint}",
            ) from error
