"""Steps of fully sharded training that others have published: some of them profiles are fitted to, the others are held
out. Torch-free.

Which are held out was settled by the model's size before anything was fitted, and all of more than 4,096 tokens are:
the kernel of their attention is older than ours.
"""

from __future__ import annotations

from dataclasses import replace

from published_steps import COMPILED, TITAN, Published, gpt, llama

from orchestrator.parallel.layout import Layout

MPT = replace(TITAN, products_again=0.0)
"""MosaicML's LLM-foundry: FSDP gathers in bfloat16 and sums in fp32, no kernel is compiled."""
_SIZES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
_FITTED_SIZES, _LONG = ("1b", "7b", "30b"), 4096


def _mpt(
    machine: str, name: str, length: int, gpus: int, micro: int, batch: int, tokens: int, again: bool
) -> Published:
    """A row of tokens per second of all GPUs."""
    layers, hidden, heads = _SIZES[name]
    layout = Layout(dp=gpus, zero=3, micro_batch=micro, recompute="full" if again else "none")
    shape, source = gpt(layers, hidden, heads, length, 50368), "LLM-foundry, benchmarks of 2023"
    title = f"MPT {name}, {length} tokens"
    return Published(title, source, machine, shape, layout, batch, batch * length / tokens, MPT)


_ON_H100 = [
    ("70b", 2048, 64, 8, 2048, 66523, True), ("70b", 2048, 32, 2, 1024, 28242, True),
    ("30b", 8192, 8, 1, 168, 11072, True), ("30b", 2048, 32, 14, 1344, 73860, True),
    ("30b", 2048, 8, 3, 504, 16022, True), ("13b", 16384, 8, 3, 72, 23881, True),
    ("13b", 4096, 8, 10, 240, 37740, True),
    ("13b", 2048, 64, 2, 128, 307209, False), ("13b", 2048, 8, 2, 16, 38336, False),
    ("7b", 32768, 8, 2, 32, 26550, True), ("7b", 8192, 8, 8, 128, 55481, True), ("7b", 2048, 8, 6, 48, 85144, False),
    ("3b", 8192, 8, 3, 144, 132626, False), ("3b", 2048, 64, 6, 1152, 1441663, False),
    ("1b", 16384, 8, 2, 64, 157194, False), ("1b", 2048, 8, 14, 112, 363645, False),
    ("760m", 2048, 8, 24, 384, 505177, False),
]  # fmt: skip
_ON_A100_80 = [
    ("70b", 2048, 64, 8, 2048, 26274, True), ("70b", 2048, 32, 2, 1024, 11962, True),
    ("30b", 8192, 8, 1, 168, 4594, True), ("30b", 2048, 8, 3, 504, 7330, True), ("13b", 16384, 8, 3, 72, 11454, True),
    ("13b", 4096, 8, 10, 240, 16482, True), ("13b", 2048, 8, 2, 48, 18097, False),
    ("7b", 32768, 8, 2, 32, 13382, True), ("7b", 8192, 8, 8, 128, 25655, True), ("7b", 2048, 8, 6, 96, 37130, False),
    ("3b", 8192, 8, 3, 144, 61567, False), ("3b", 2048, 8, 10, 160, 86491, False),
    ("1b", 16384, 8, 2, 64, 79650, False), ("1b", 2048, 8, 14, 448, 164109, False),
    ("760m", 2048, 8, 24, 384, 259472, False), ("350m", 2048, 8, 32, 512, 470263, False),
    ("125m", 2048, 8, 32, 512, 1133901, False),
]  # fmt: skip
_ON_A100_40 = [
    ("70b", 2048, 128, 4, 512, 48194, True), ("70b", 2048, 64, 2, 128, 17672, True),
    ("30b", 2048, 128, 6, 768, 110803, True), ("30b", 2048, 32, 4, 128, 27431, True),
    ("13b", 8192, 8, 1, 128, 11258, True), ("13b", 2048, 128, 16, 2048, 252444, True),
    ("13b", 2048, 8, 4, 512, 13347, True), ("7b", 16384, 8, 1, 32, 17998, True), ("7b", 4096, 8, 6, 192, 26930, True),
    ("7b", 2048, 128, 18, 2304, 463749, True), ("3b", 8192, 8, 1, 64, 57193, False),
    ("3b", 2048, 128, 6, 768, 1220885, False),
]  # fmt: skip
_KEMPNER = {
    "7B": llama(8.03e9, 32, 4096, 32, 8, 14336, 4096),
    "13B": llama(14.84e9, 40, 5120, 40, 8, 17920, 4096),
    "70B": llama(70.55e9, 80, 8192, 64, 8, 28672, 4096),
}


def _kempner(name: str, dp: int, tp: int, seconds: float, compiled: bool = True) -> Published:
    """A row of step times, on nodes of four."""
    micro, parts = (2 if name == "70B" else 4), (2 if name == "7B" else 4)
    layout = Layout(dp=dp, tp=tp, zero=3 if dp > 1 else 0, micro_batch=micro, recompute="full")
    program, source = (COMPILED if compiled else TITAN), "KempnerForge, 2026-04"
    batch, shape = micro * dp * parts, _KEMPNER[name]
    return Published(
        f"Llama 3 {name}, Kempner", source, "h200", shape, layout, batch, seconds, program, per_node=4
    )


_ON_H200 = [
    _kempner("7B", 1, 1, 3.13), _kempner("7B", 2, 1, 3.50), _kempner("7B", 1, 2, 2.49), _kempner("7B", 4, 1, 3.36),
    _kempner("7B", 1, 4, 1.30), _kempner("7B", 2, 2, 2.52), _kempner("7B", 2, 4, 1.48), _kempner("7B", 4, 4, 1.58),
    _kempner("7B", 8, 4, 1.68), _kempner("13B", 8, 1, 14.81, False), _kempner("13B", 2, 4, 4.79),
    _kempner("13B", 4, 4, 4.87), _kempner("13B", 8, 4, 5.03), _kempner("70B", 8, 4, 14.85),
]  # fmt: skip
_ALL = [
    *(_mpt("h100", *row) for row in _ON_H100),
    *(_mpt("a100-80-fused", *row) for row in _ON_A100_80),
    *(_mpt("a100-40-fused", *row) for row in _ON_A100_40),
    *_ON_H200,
]


def _is_fitted(row: Published) -> bool:
    sized = row.name.startswith((*(f"MPT {size}," for size in _FITTED_SIZES), "Llama 3 7B,"))
    return sized and row.shape.sequence_length <= _LONG and row.machine != "a100-40-fused"


FITTED = [row for row in _ALL if _is_fitted(row)]
HELD_OUT = [row for row in _ALL if not _is_fitted(row)]
