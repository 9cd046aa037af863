"""What a step computes on a GPU: kernels, bits, memory and waits; on a CPU what of it has a meaning there."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from rank_cases import job, micro_batches, workload_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from varlen import varlen_attn

from orchestrator.checkpoint import shared_memory
from orchestrator.checkpoint.shared_memory import SharedBuffer
from orchestrator.parallel.context import bounds_of_chunk
from orchestrator.parallel.device import COMPUTE, Device, set_numerics
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import backend_of_groups
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.model import kernels
from workloads.model.kernels import attend
from workloads.model.masks import Documents
from workloads.model.moe import grouped_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLAIN = Layout(micro_batch=2)
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def engine_of(
    of: dict[str, Any], device: str, group: dist.ProcessGroup, layout: Layout = PLAIN
) -> TorchEngine:
    """An engine with its initial weights."""
    spec = job(of)
    made = TorchEngine(
        spec.engine,
        workload_of(spec),
        layout,
        Device(torch.device(device), COMPUTE[spec.train.precision], group),
    )
    made.initialise(spec.seed)
    return made


def steps(engine: TorchEngine, of: dict[str, Any], count: int) -> list[float]:
    """The losses of so many steps."""
    spec, layout = job(of), PLAIN
    batches = [micro_batches(workload_of(spec), spec, layout, step) for step in range(count)]
    return [engine.train_step(batch, 1e-3).loss for batch in batches]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("kind", ["none", "causal", "documents", "lower right"])
def test_every_mask_has_a_fused_kernel(kind: str, kv_heads: int, device: str) -> None:
    """Flash, efficient or cuDNN; the kernel without fusion, which holds all scores, is shut off on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(2, 8, 256, 64), (2, kv_heads, 512 if kind == "lower right" else 256, 64)]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(shapes[min(n, 1)], device=device, dtype=dtype, requires_grad=True) for n in range(3)
    )
    allowed: Any = None
    if kind == "documents":
        numbers = torch.arange(256, device=device) // 100
        allowed = ((numbers[:, None] == numbers[None, :]).tril())[None, None].expand(2, 1, -1, -1)
    elif kind == "lower right":
        dense = torch.ones(256, 512, dtype=torch.bool, device=device).tril(256)
        allowed = causal_lower_right(256, 512) if device == "cuda" else dense
    with sdpa_kernel(FUSED if device == "cuda" else list(SDPBackend.__members__.values())):
        found = attend(query, key, value, allowed, kind == "causal", 0.125)
        found.float().square().sum().backward()
    times = 8 // kv_heads
    scores = query.float() @ key.float().repeat_interleave(times, 1).mT * 0.125
    if kind != "none":
        shown = dense if kind == "lower right" else torch.ones_like(scores, dtype=torch.bool).tril()
        shown = allowed if kind == "documents" else shown
        scores = scores.masked_fill(~shown, -torch.inf)
    wanted = scores.softmax(-1) @ value.float().repeat_interleave(times, 1)
    torch.testing.assert_close(found.float(), wanted, atol=2e-2 if device == "cuda" else 1e-5, rtol=0)
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in (query, key, value))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("part", ["whole", "second quarter"])
def test_documents_have_variable_length_flash(
    part: str, window: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole rows, and of a chunk of context parallelism, before which documents have keys and no query."""
    if device == "cpu":
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
        monkeypatch.setattr(kernels, "_has_flash", lambda _: True)
    torch.manual_seed(0)
    given = [
        torch.randn(2, heads, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    starts = torch.tensor([[0, 10, 70, 100], [0, 128, 200, 256]], dtype=torch.int32, device=device)
    numbers = (torch.arange(256, device=device) >= starts[:, :, None]).sum(1)
    first, end = (0, 256) if part == "whole" else (64, 128)
    query, key, value = given[0][:, :, first:end], given[1][:, :, :end], given[2][:, :, :end]
    found = kernels.attend_flash(query, key, value, *bounds_of_chunk(starts, first, end), window, 0.125)
    assert found is not None
    shown = Documents(numbers, window).dense(256, torch.device(device))[:, :, first:end, :end]
    wide = [one.detach().double().requires_grad_() for one in given]
    scores = wide[0][:, :, first:end] @ wide[1][:, :, :end].repeat_interleave(4, 1).mT * 0.125
    shares = scores.masked_fill(~shown, -torch.inf).softmax(-1)
    wanted = shares @ wide[2][:, :, :end].repeat_interleave(4, 1)
    torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=0)
    ours = torch.autograd.grad(found.float().square().sum(), given)
    theirs = torch.autograd.grad(wanted.square().sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_tokens(device: str, dtype: torch.dtype) -> None:
    counts = torch.tensor([5, 0, 11, 0], device=device)
    rows = torch.randn(16, 32, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 64, 32, device=device, dtype=dtype, requires_grad=True)
    found = grouped_linear(rows, weight, counts)
    parts = [r @ w.t() for r, w in zip(rows.split(counts.tolist()), weight, strict=True)]
    torch.testing.assert_close(
        found, torch.cat(parts), atol=0.3 if dtype == torch.bfloat16 else 1e-3, rtol=0.02
    )
    found.float().square().sum().backward()
    assert weight.grad is not None
    assert not weight.grad[1].any()
    assert not weight.grad[3].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_has_the_same_bits_twice(device: str, alone: dist.ProcessGroup) -> None:
    of = {"model": "gpt-tiny", "train": {"precision": "bf16", "determinism": "bitwise"}}
    if device == "cuda":
        set_numerics(bitwise=True)
    try:
        found = []
        for _ in range(2):
            engine = engine_of(of, device, alone)
            losses = steps(engine, of, 3)
            found.append((losses, [piece.data.cpu().clone() for piece in engine.state()]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.gpu
def test_a_failed_registration_does_not_fail_what_comes_after() -> None:
    buffer = SharedBuffer()
    buffer.make_room(1 << 20, pin=True)
    assert buffer._pinned
    again = torch.cuda.cudart().cudaHostRegister(buffer._bytes.data_ptr(), len(buffer._bytes), 0)
    assert int(again) != 0
    shared_memory._forget_error()
    assert float(torch.ones(8, device="cuda").sum()) == 8.0
    buffer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["gpt-tiny", "qwen3-tiny"])
def test_a_step_of_a_dense_model_waits_once(model: str, alone: dist.ProcessGroup) -> None:
    of = {"model": model, "train": {"precision": "bf16"}}
    engine = engine_of(of, "cuda", alone)
    steps(engine, of, 2)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            steps(engine, of, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in told if "synchroniz" in str(one.message)]) <= 1, [str(t.message) for t in told]


@pytest.mark.gpu
def test_compiled_blocks_with_recomputation(alone: dist.ProcessGroup) -> None:
    of = {"model": "gpt-tiny", "train": {"precision": "bf16", "compile": True}}
    plain = steps(engine_of({**of, "train": {"precision": "bf16"}}, "cuda", alone), of, 3)
    layout = dataclasses.replace(PLAIN, recompute="full")
    found = steps(engine_of(of, "cuda", alone, layout), of, 3)
    assert found == pytest.approx(plain, rel=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["gpt-tiny", "qwen3-tiny", "mixtral-tiny"])
def test_bf16_agrees_with_the_cpu(model: str, alone: dist.ProcessGroup) -> None:
    of = {"model": model, "train": {"precision": "bf16"}}
    found, wanted = (steps(engine_of(of, device, alone), of, 4) for device in ("cuda", "cpu"))
    assert found == pytest.approx(wanted, rel=2**-7)


@pytest.mark.gpu
def test_a_group_within_the_whole_is_of_nccl_alone(alone: dist.ProcessGroup) -> None:
    assert backend_of_groups(dataclasses.replace(PLAIN, offload="optimizer")) is None
    backend = backend_of_groups(PLAIN)
    assert backend == "cuda:nccl"
    group = dist.new_group([0], backend=backend, use_local_synchronization=True)
    ones = torch.ones(4, device="cuda")
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)
