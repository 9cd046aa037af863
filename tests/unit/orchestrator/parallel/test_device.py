"""The choice of device, as far as it can be seen without one."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from orchestrator.config.errors import InputError
from orchestrator.parallel import device as module
from orchestrator.parallel.device import (
    BITWISE,
    KEPT_BY_MALLOC,
    WORKSPACE,
    Device,
    allow_locked_memory,
    check_has_precision,
    check_own_gpu,
    gpu_of,
    make_ready,
    peak_memory,
    set_malloc,
    set_numerics,
)
from workloads.model.masks import SEGMENTS, STARTS


@pytest.mark.parametrize(("local_rank", "visible", "gpu"), [(0, 8, 0), (7, 8, 7), (0, 1, 0), (5, 1, 0)])
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_it_sees(
    local_rank: int, visible: int, gpu: int
) -> None:
    assert gpu_of(local_rank, visible) == gpu


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="node of 3 ranks has 2 GPUs"):
        gpu_of(2, 2)


def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gather_json", lambda _: ["GPU-a", "GPU-b", "GPU-a"])
    with pytest.raises(InputError, match="ranks 0 and 2 have one GPU, GPU-a"):
        check_own_gpu("GPU-a")
    check_own_gpu("GPU-b")


@pytest.fixture
def settings() -> Iterator[None]:
    """Torch's settings and the environment are put back."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with mock.patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@pytest.mark.usefixtures("settings")
def test_a_gpu_without_products_in_8_bits_is_refused_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A40")
    for capability, has in (((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        check_has_precision("bf16", torch.device("cuda"))
        with (
            nullcontext()
            if has
            else pytest.raises(InputError, match="NVIDIA A40 has no FP8 matrix multiplication")
        ):
            check_has_precision("fp8", torch.device("cuda"))


@pytest.mark.parametrize("bitwise", [False, True])
def test_numerics_are_set_and_not_left_to_defaults(bitwise: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    set_numerics(bitwise)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert torch.are_deterministic_algorithms_enabled() == bitwise
    assert (BITWISE.items() <= os.environ.items()) == bitwise
    assert WORKSPACE.items() <= os.environ.items()


@pytest.mark.usefixtures("settings")
def test_a_standby_that_does_not_know_its_gpu_leaves_all_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = mock.Mock()
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    for visible in (0, 8):
        monkeypatch.setattr(torch.cuda, "is_available", lambda visible=visible: visible > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        make_ready()
    linear.assert_not_called()


def test_casts_are_kept_only_where_weights_stay() -> None:
    group = mock.Mock(spec=dist.ProcessGroup)
    for keeps in (True, False):
        with Device(torch.device("cpu"), torch.bfloat16, group, keeps).autocast():
            assert torch.is_autocast_cache_enabled() == keeps


def test_of_a_gpus_memory_that_of_the_host_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    here = peak_memory()
    assert peak_memory(here // 2) >= here - here // 2 > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    assert peak_memory(here) == 5


@pytest.mark.parametrize(("most", "told"), [(8 << 20, "8 MiB may be locked"), (resource.RLIM_INFINITY, "")])
def test_a_bound_of_locked_memory_is_told_where_there_are_cards(
    most: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (1 << 16, most)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    monkeypatch.setattr(module, "CARDS", tmp_path / "none")
    allow_locked_memory()
    assert not capsys.readouterr().err
    monkeypatch.setattr(module, "CARDS", tmp_path)
    allow_locked_memory()
    said = capsys.readouterr().err
    assert told in said if told else not said
    assert limits[resource.RLIMIT_MEMLOCK] == (most, most)


def test_batches_are_pinned_for_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With where their documents start, so that nobody waits to know it."""
    devices, pinned = mock.MagicMock(), list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "device", devices)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    group, batch = mock.Mock(spec=dist.ProcessGroup), {SEGMENTS: torch.tensor([[0, 0, 1]])}
    assert Device(torch.device("cpu"), torch.float32, group).pinned(batch) is batch
    assert not pinned
    found = Device(torch.device("cuda", 3), torch.float32, group).pinned(batch)
    assert found[STARTS].tolist() == [[0, 2]]
    assert len(pinned) == len(found) == 2
    devices.assert_called_once_with(torch.device("cuda", 3))


def test_memory_that_tensors_have_left_is_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has set thresholds of his own keeps them; another C library has none."""
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda option, value: asked.append((option, value)))
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: library)
    set_malloc(KEPT_BY_MALLOC)
    assert asked == [(-3, 2**25), (-1, 2**31 - 1)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    set_malloc(KEPT_BY_MALLOC)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    del library.mallopt
    set_malloc(KEPT_BY_MALLOC)
    assert len(asked) == 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
def test_the_memory_of_freed_tensors_is_returned_at_the_end() -> None:
    program = """
import torch
from unittest import mock
from orchestrator.parallel.device import KEPT_BY_MALLOC, Device, set_malloc
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
set_malloc(KEPT_BY_MALLOC)
kept = [torch.ones(2**18) for _ in range(64)]  # 1 MiB each
held = kept[1::2]
del kept
before = resident()
Device(torch.device("cpu"), torch.float32, mock.Mock()).trim()
print(before - resident() > 24 * 2**20, held[0].sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", f"{2.0**18}"], done.stderr


def test_what_a_rank_keeps_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda option, value: asked.append((option, value)))
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: library)
    group = mock.Mock(spec=dist.ProcessGroup)
    with Device(torch.device("cuda", 0), torch.float32, group).long_lived():
        assert asked == []
    with (
        contextlib.suppress(ZeroDivisionError),
        Device(torch.device("cpu"), torch.float32, group).long_lived(),
    ):
        assert asked == [(-3, 2**17)]
        raise ZeroDivisionError
    assert asked[1:] == [(-3, 2**25), (-1, 2**31 - 1)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such options")
def test_glibc_takes_these_thresholds() -> None:
    program = "import ctypes, sys; sys.exit(not all(ctypes.CDLL(None).mallopt(*each) for each in "
    assert (
        subprocess.run([sys.executable, "-c", f"{program}{list(KEPT_BY_MALLOC.items())}))"]).returncode == 0
    )
