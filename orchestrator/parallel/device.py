"""Choice of the device, the process-group backend and the compute dtype of a rank."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster.workers.network_interface import use_interface_of
from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.config.errors import InputError
from orchestrator.config.resources import PerWorker
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.train.config import TrainSpec
from workloads.model import casts
from workloads.model.masks import with_starts
from workloads.workload import Batch

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=20)
"""Timeout of a collective. A dead peer is detected from outside, and this process replaced, long before.

It is longer than `health.FIRST_STEP`, after which the controller ends a gang that hangs and names the missing ranks. A
rank whose collective times out before that would count as the fault.
"""

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Dtype of matrix products by the job's precision, except for those that `multiply_in_8_bits` replaces."""

WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment that makes cuBLAS sum in a fixed order (cuBLAS documentation, section 2.1.4). cuBLAS reads it at its
start. A standby process starts before its job is known, so all jobs have it. On Hopper it is torch's default.
"""
BITWISE = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Environment that makes NCCL sum in a fixed order. It is read at NCCL's start; otherwise NCCL chooses by size and
load.
"""


HAS_8_BITS = (8, 9)
"""The first compute capability with float8 products, Ada (NVIDIA's CUDA programming guide)."""
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""gloo's switch to connect two ranks at their first message. By default each rank of a group connects to all others at
once, and most of these connections are never used: a sum over N ranks needs about log N of them.
"""
KEPT_BY_MALLOC = {-3: 32 * 2**20, -1: 2**31 - 1}
"""glibc's M_MMAP_THRESHOLD at its maximum, and M_TRIM_THRESHOLD (mallopt(3)). With these a step of a small model takes
up to a third less time (docs/benchmarks.md).
"""
APART_BY_MALLOC = {-3: 128 * 2**10}
"""M_MMAP_THRESHOLD at its default."""
CARDS = Path("/dev/infiniband")
"""The folder of network cards that NCCL reaches without the kernel."""


@dataclass(frozen=True)
class Device:
    """A rank's device, its compute dtype, and the process group of all ranks.

    Attributes:
        device: the device.
        compute: dtype of matrix products.
        group: all ranks.
        keeps_casts: whether a weight's cast is kept until the forward pass ends. Under ZeRO 3 that would keep casts of
            all weights, although each is gathered only for as long as it is needed.
        keeps_weights: whether all micro-batches of a step use the same weight tensors. Under ZeRO 2 and 3 FSDP2 gathers
            new ones.
    """

    device: torch.device
    compute: torch.dtype
    group: dist.ProcessGroup
    keeps_casts: bool = True
    keeps_weights: bool = True

    def at_zero_stage(self, zero: int, shares_layers: bool) -> Device:
        """Return the device with what it may keep of weights.

        Under ZeRO 3 a kept cast would outlive the gathered weight that it was made of, and hold a copy of the whole
        model. Only layers that share weights use it again.

        Args:
            zero: the ZeRO stage, 0 to 3.
            shares_layers: whether several layers of the model have the same weights.
        """
        return dataclasses.replace(self, keeps_casts=zero < 3 or shares_layers, keeps_weights=zero < 2)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for the forward pass: weights stay fp32, matrices are multiplied in the compute dtype."""
        if self.compute is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute, cache_enabled=self.keeps_casts)

    @contextlib.contextmanager
    def casting_once(self) -> Iterator[None]:
        """Context manager for several forward passes with the same weights: they share the casts of weights.

        Otherwise every micro-batch that waits for its backward pass holds a cast of all weights.
        """
        if self.compute is torch.float32 or not self.keeps_weights:
            yield
            return
        torch.autocast_increment_nesting()  # autocast clears its cache when the outermost context ends
        try:
            with casts.shared():
                yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    @contextlib.contextmanager
    def long_lived(self) -> Iterator[None]:
        """Context manager for the allocation of tensors that a rank keeps, such as weights and optimizer states.

        On a CPU they get memory of their own. Between freed activations they would divide the memory that later ones
        can use, and a rank would need up to a quarter more (docs/benchmarks.md).
        """
        if self.device.type != "cpu":
            yield
            return
        set_malloc(APART_BY_MALLOC)
        try:
            yield
        finally:
            set_malloc(KEPT_BY_MALLOC)

    def trim(self) -> None:
        """Return the memory of freed tensors to the system, for a rank that computes no more steps. Nothing changes on
        a GPU, or with another C library than glibc.
        """
        if self.device.type == "cpu":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    def pinned(self, batch: Batch) -> Batch:
        """Return the batch in page-locked memory, from which a GPU copies while it computes; unchanged on a CPU.

        Any thread may call it. The current device is per thread, so it is set here.
        """
        if self.device.type != "cuda":
            return batch
        with torch.cuda.device(self.device):
            return {name: value.pin_memory() for name, value in with_starts(batch).items()}


def set_malloc(options: Mapping[int, int]) -> None:
    """Set options of the C library's allocator, by their numbers in mallopt(3).

    By default glibc returns freed tensors to the kernel after each pass, and the kernel clears every page again; with
    KEPT_BY_MALLOC it keeps those of up to 32 MiB for later ones. Nothing changes if the user has set these options, or
    with another C library.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        allocator = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            allocator(option, value)


def open_device(train: TrainSpec, worker: PerWorker, context: WorkerContext) -> Device:
    """Take this rank's device, and join the process group of all ranks: gloo on CPU, NCCL and gloo on CUDA.

    Raises RuntimeError if the job asks for a GPU and there is none. Raises InputError if two ranks would share a GPU,
    or if the GPU does not support the job's precision.

    Args:
        train: the job's training options; read for dtype and determinism.
        worker: the resources of a rank.
        context: what the worker host tells its rank.
    """
    rank_info = context.rank_info
    # torch takes all cores by default; ranks of a node would then compete for them. The number also decides how CPU
    # kernels split their sums, so it must not depend on the machine.
    torch.set_num_threads(max(int(worker.cpu), 1))
    if worker.gpu:
        device = _take_gpu(rank_info, train.determinism == "bitwise")
        check_has_precision(train.dtype, device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        set_malloc(KEPT_BY_MALLOC)
    use_interface_of(rank_info.node or rank_info.host)
    store = context.store or dist.TCPStore(
        rank_info.host, context.store_port(), is_master=False, timeout=COLLECTIVE_TIMEOUT
    )
    os.environ.setdefault(LAZY_GLOO, "1")
    dist.init_process_group(
        backend, store=store, rank=rank_info.rank, world_size=rank_info.world_size, timeout=COLLECTIVE_TIMEOUT
    )
    group = dist.group.WORLD
    assert group is not None
    if worker.gpu:
        check_own_gpu(str(torch.cuda.get_device_properties(device).uuid))
    return Device(device, COMPUTE[train.dtype], group)


def check_has_precision(precision: str, device: torch.device) -> None:
    """Raise InputError if the precision is fp8 and the GPU has no FP8 matrix multiplication.

    Args:
        precision: `train.precision` of the job.
        device: the rank's GPU.
    """
    if precision == "fp8" and torch.cuda.get_device_capability(device) < HAS_8_BITS:
        problem = f"{torch.cuda.get_device_name(device)} has no FP8 matrix multiplication"
        raise InputError(problem, "train.precision", "set it to bf16, or use an Ada, Hopper or Blackwell GPU")


def _take_gpu(rank_info: RankInfo, bitwise: bool) -> torch.device:
    """Return this rank's GPU after setting its numerics. Raises RuntimeError without one."""
    if not torch.cuda.is_available():
        raise RuntimeError("per_worker.gpu is 1, but this worker's torch sees no GPU")
    device = torch.device("cuda", gpu_of(rank_info.local_rank, torch.cuda.device_count()))
    set_numerics(bitwise)
    torch.cuda.set_device(device)
    allow_locked_memory()
    return device


def allow_locked_memory() -> None:
    """Let NCCL lock as much memory for the network's cards as the system allows this process.

    Prints a warning if the system has a limit, as in most containers: NCCL then fails at its first message between
    nodes.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard_limit, hard_limit))
    if hard_limit != resource.RLIM_INFINITY and CARDS.exists():
        limit = f"{hard_limit / 2**20:.0f} MiB may be locked, and NCCL locks more for the cards in {CARDS}"
        print(f"{limit}: have the container runtime set memlock to unlimited", file=sys.stderr)


def make_ready() -> None:
    """Initialise the GPU before its rank is known: its context, its allocator, and cuBLAS for both passes.

    Does so only if this process sees a single GPU, as under Ray. All memory but the context is freed, and no random
    numbers are drawn.
    """
    if not torch.cuda.is_available() or torch.cuda.device_count() != 1:
        return
    set_numerics(bitwise=False)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(16, 16, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(matrix, matrix, matrix[0]).sum().backward()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # they take 32 MiB for each thread and stream
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def gpu_of(local_rank: int, visible: int) -> int:
    """Return the index of a rank's GPU among those that its process sees: all of its node, or its own alone, as under
    Ray.

    Raises InputError if there are too few.

    Args:
        local_rank: the rank's number on its node.
        visible: number of GPUs that the process sees.
    """
    if visible == 1:
        return 0  # `check_own_gpu` detects a GPU that several ranks have
    if local_rank >= visible:
        problem = f"the node of {local_rank + 1} ranks has {visible} GPUs"
        raise InputError(problem, "resources.workers", "run no more workers than GPUs on a node")
    return local_rank


def check_own_gpu(uuid: str) -> None:
    """Raise InputError, on all ranks together, if ranks share a GPU; `uuid` is that of this rank's GPU."""
    everyone = gather_json(uuid)
    ranks = [rank for rank, other in enumerate(everyone) if other == uuid]
    if len(ranks) > 1:
        names = " and ".join(map(str, ranks))
        hint = "run no more workers than GPUs on a node"
        raise InputError(f"ranks {names} have one GPU, {uuid}", "resources.workers", hint)


def set_numerics(bitwise: bool) -> None:
    """Make CUDA multiply fp32 in full precision, whatever a library's default or another program's setting is.

    With `bitwise`, use only algorithms that always give the same bits. An operator without one then raises.
    """
    # TF32 has 10 bits of mantissa where fp32 has 23 (NVIDIA A100 whitepaper), so fp32 jobs would not be equal to their
    # CPU runs.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    # cuDNN's benchmark picks a kernel by its measured time, so two runs of a job could have different bits.
    torch.backends.cudnn.benchmark = False
    os.environ.update(WORKSPACE)
    if bitwise:
        os.environ.update(BITWISE)
        torch.use_deterministic_algorithms(True)
        unread: Any = torch.utils.deterministic
        unread.fill_uninitialized_memory = False  # no code reads uninitialised memory


def peak_memory(before: int = 0) -> int:
    """Return the peak memory of this rank in bytes.

    On a GPU it is what torch allocated. On a CPU it is the resident memory beyond `before`, which libraries took. Pages
    of files are not counted, because the kernel reclaims them when memory is short, and ranks share them.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - _file_pages() - before


def _file_pages() -> int:
    """Return the resident bytes of this process that are mapped from files; 0 if the system does not say."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("RssFile:"):
                return int(line.split()[1]) * 1024
    return 0


def close_device() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
