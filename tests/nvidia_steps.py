"""Steps in 16 and in 8 bits that NVIDIA has published of dense models on H100 and B200: its DGX Cloud benchmarks
(github.com/NVIDIA/dgxc-benchmarking, v25.02), and the summaries of NeMo and Megatron-Bridge. Torch-free.

No profile is fitted to them. What their program does otherwise than this engine, and no source has a number for, is
fitted to the smallest number of GPUs of each model of the first, in 16 and in 8 bits; all else is held out.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_steps import FUSED
from published_steps import LLAMA_8B, LLAMA_70B, Published, gpt, layer_weights, llama

from orchestrator.parallel.layout import Layout, ModelShape

BF16 = replace(FUSED, gradient_width=2, hidden_sums=0.5)
"""NeMo sums gradients over ranks in 16 bits, and sends parts of a tensor-parallel product while others are computed: of
30, 40, 50 and 60 % half of the traffic is least far off."""
FP8 = replace(BF16, in_8_bits=3, quantised=1.0)
"""TransformerEngine has 8 bits in all three products, makes weights so once a step, and activations in the kernel that
writes them: of 0.25 to 1.5 numbers one is least far off."""


def _squared(layers: int, hidden: int, heads: int, keys: int, feedforward: int) -> ModelShape:
    """A Nemotron: as a Llama, with feed-forward blocks of two products; 4,096 tokens."""
    vocabulary = 256000
    whole = layers * layer_weights(hidden, heads, keys, feedforward, gated=False) + 2 * vocabulary * hidden
    return llama(whole, layers, hidden, heads, keys, feedforward, 4096, vocabulary, gated=False)


def _llama_405b(layers: int) -> ModelShape:
    """As NVIDIA's configuration has it, with 16 groups of keys and values."""
    whole = layers * layer_weights(16384, 128, 16, 53248) + 2 * 128256 * 16384
    return llama(whole, layers, 16384, 128, 16, 53248, 8192)


LLAMA_405B = _llama_405b(126)
GPT_175B = gpt(96, 12288, 96)
NEMOTRON_15B = _squared(32, 6144, 48, 8, 24576)
NEMOTRON_340B = _squared(96, 18432, 96, 8, 73728)


def _cloud(
    name: str, shape: ModelShape, layout: Layout, batch: int, seconds: float, eight: float
) -> list[Published]:
    """Two rows, in 16 and in 8 bits."""
    source = "NVIDIA DGX Cloud, 2025-02"
    return [
        Published(f"{name}, bf16", source, "h100", shape, layout, batch, seconds, BF16),
        Published(f"{name}, fp8", source, "h100", shape, layout, batch, eight, FP8),
    ]


def _weak(
    name: str, shape: ModelShape, layout: Layout, batch: int, gpus: int, times: list[tuple[float, float]]
) -> list[Published]:
    """Rows of twice as many GPUs with twice the batch each."""
    found = []
    for doubled, (seconds, eight) in enumerate(times):
        dp = 2**doubled * gpus // (layout.pp * layout.cp * layout.tp)
        here = layout.but(dp=dp, zero=1)
        found += _cloud(f"{name}, {2**doubled * gpus} GPUs", shape, here, 2**doubled * batch, seconds, eight)
    return found


_INTERLEAVED = Layout(schedule="interleaved", sequence=True)
CLOUD = [
    *(
        row
        for layers, pp, gpus, batch, seconds, eight in (
            (7, 1, 32, 126, 9.00, 5.75), (21, 3, 96, 126, 8.87, 5.63), (42, 3, 192, 252, 17.30, 10.8),
            (126, 9, 576, 252, 17.50, 11.00), (126, 9, 1152, 504, 17.60, 11.10), (126, 9, 2304, 1008, 17.70, 11.20),
        )
        for row in _cloud(
            f"Llama 3.1 405B, {layers} layers, {gpus} GPUs", _llama_405b(layers),
            Layout(
                pp=pp, cp=2, tp=8, dp=gpus // (16 * pp), zero=1, sequence=True,
                schedule="interleaved" if pp > 1 else "1f1b", virtual=7 if pp > 1 else 2,
            ),
            batch, seconds, eight,
        )
    ),
    *_weak("Llama 3.1 70B", LLAMA_70B, _INTERLEAVED.but(pp=4, cp=2, tp=4, virtual=5), 128, 64, [
        (14.61, 10.46), (14.70, 10.52), (14.72, 10.75), (14.80, 10.76), (14.86, 10.83), (14.84, 10.99),
    ]),
    *_weak("Llama 3.1 8B", LLAMA_8B, Layout(cp=2), 128, 8, [
        (12.78, 9.44), (12.99, 9.47), (13.00, 9.60), (13.00, 9.64), (13.16, 9.73),
    ]),
    *_weak("GPT 175B", GPT_175B, _INTERLEAVED.but(pp=8, tp=4, virtual=12), 256, 128, [
        (8.309, 5.626), (8.408, 5.725), (8.42, 5.774), (8.453, 5.82), (8.49, 5.96),
    ]),
    *_weak("Nemotron 15B", NEMOTRON_15B, Layout(tp=4, sequence=True, micro_batch=4), 64, 16, [
        (2.812, 2.039), (2.824, 2.046), (2.845, 2.048), (2.859, 2.059), (2.852, 2.075), (2.875, 2.12), (2.895, 2.094),
        (2.887, 2.12),
    ]),
    *_weak("Nemotron 340B", NEMOTRON_340B, _INTERLEAVED.but(pp=8, tp=8, virtual=12), 32, 128, [
        (4.61, 3.16), (4.67, 3.21), (4.7, 3.26), (4.73, 3.34), (4.84, 3.49),
    ]),
]  # fmt: skip


def _summary(
    name: str,
    source: str,
    shape: ModelShape,
    layout: Layout,
    gpus: int,
    batch: int,
    tokens: int,
    machine: str = "h100",
) -> Published:
    """A row of tokens per second and GPU."""
    dp = gpus // (layout.pp * layout.cp * layout.tp)
    seconds = batch * shape.sequence_length / (tokens * gpus)
    zero = layout.zero or 1
    return Published(name, source, machine, shape, layout.but(dp=dp, zero=zero), batch, seconds, FP8)


def _llama_2(
    layers: int, hidden: int, heads: int, keys: int, feedforward: int, billions: float
) -> ModelShape:
    return llama(1e9 * billions, layers, hidden, heads, keys, feedforward, 4096, 32000)


_NEMO, _25_02, _25_09 = "NeMo 24.07", "NeMo 25.02", "Megatron-Bridge, 25.09"
_25_11, _26_02 = "Megatron-Bridge, 25.11", "Megatron-Bridge, 26.02"
_ONE, _SLICED = Layout(), Layout(sequence=True)
_175B, _340B = _INTERLEAVED.but(pp=8, tp=4, virtual=6), _INTERLEAVED.but(pp=8, tp=8, virtual=12)
_70B, _405B = _INTERLEAVED.but(pp=8, tp=4, virtual=5), _INTERLEAVED.but(pp=8, tp=8, cp=2, virtual=8)
_ON_H100 = (
    ("GPT3 5B", _NEMO, gpt(24, 4096, 32), _ONE.but(micro_batch=4), 64, 2048, 22521),
    ("GPT3 20B", _NEMO, gpt(44, 6144, 48), _SLICED.but(tp=2, micro_batch=2), 64, 256, 5851),
    ("GPT3 175B", _NEMO, GPT_175B, _175B, 128, 256, 726),
    ("GPT3 175B", _NEMO, GPT_175B, _175B.but(micro_batch=2), 512, 2048, 782),
    ("Llama 2 7B", _NEMO, _llama_2(32, 4096, 32, 32, 11008, 6.74), _ONE, 8, 128, 16847),
    (
        "Llama 2 13B", _NEMO, _llama_2(40, 5120, 40, 40, 13824, 13.0),
        _ONE.but(pp=4, schedule="interleaved", virtual=10), 16, 128, 8646,
    ),
    ("Llama 2 70B", _NEMO, _llama_2(80, 8192, 64, 8, 28672, 69.0), _70B.but(pp=4, virtual=20), 64, 128, 1707),
    ("Nemotron 8B", _NEMO, _squared(32, 4096, 32, 32, 16384), _SLICED.but(tp=2, micro_batch=4), 64, 256, 12701),
    (
        "Nemotron 22B", _NEMO, _squared(40, 6144, 48, 48, 24576),
        _INTERLEAVED.but(pp=4, tp=2, virtual=10, micro_batch=2), 64, 256, 4256,
    ),
    ("Nemotron 340B", _NEMO, NEMOTRON_340B, _340B, 128, 32, 322),
    ("Llama 3 8B", _NEMO, LLAMA_8B, _ONE.but(cp=2), 8, 128, 12036),
    ("Llama 3 70B", _NEMO, LLAMA_70B, _70B.but(pp=4, cp=2), 64, 128, 1533),
    ("Llama 3 8B", _25_11, LLAMA_8B, _ONE.but(zero=3), 8, 128, 14451),
    ("Llama 3 8B", _25_09, LLAMA_8B, _ONE.but(zero=3), 8, 128, 14079),
    ("Llama 3 70B", _25_11, LLAMA_70B, _70B, 64, 128, 1602),
    ("Llama 3 70B", _25_09, LLAMA_70B, _70B, 64, 128, 1619),
    ("Llama 3 70B", _26_02, LLAMA_70B, _70B, 64, 256, 1621),
    ("Llama 3.1 405B", _25_11, LLAMA_405B, _405B, 1024, 512, 292),
    ("Llama 3.1 405B", _25_09, LLAMA_405B, _405B, 1024, 512, 302),
    ("Llama 3.1 405B", _26_02, LLAMA_405B, _405B, 1024, 1536, 311),
)  # fmt: skip
_ON_B200 = (
    ("GPT3 175B", _25_02, GPT_175B, _175B.but(pp=4, micro_batch=2), 512, 2048, 1600),
    ("Llama 3 8B", _25_02, LLAMA_8B, _ONE.but(micro_batch=2), 8, 128, 26006),
    ("Llama 3 70B", _25_02, LLAMA_70B, _70B.but(pp=4, tp=2, cp=2), 64, 128, 3062),
    ("Llama 3.1 405B", _25_02, LLAMA_405B, _405B.but(tp=4), 128, 64, 625),
    ("Nemotron 15B", _25_02, NEMOTRON_15B, _ONE.but(micro_batch=2), 64, 256, 14760),
    ("Nemotron 340B", _25_02, NEMOTRON_340B, _340B.but(pp=4), 128, 32, 602),
    ("Llama 3 8B", _25_11, LLAMA_8B, _ONE.but(micro_batch=2), 8, 128, 30624),
    ("Llama 3 8B", _25_09, LLAMA_8B, _ONE.but(micro_batch=2), 8, 128, 29994),
    ("Llama 3.1 405B", _25_11, LLAMA_405B, _405B.but(tp=4), 128, 64, 661),
    ("Llama 3.1 405B", _25_09, LLAMA_405B, _405B.but(tp=4), 128, 64, 664),
)
SUMMARIES = [_summary(*row) for row in _ON_H100] + [_summary(*row, machine="b200") for row in _ON_B200]
"""Rows in 8 bits."""
_SMALLEST = {row.name.split(",")[0] + row.name[-4:]: row for row in reversed(CLOUD)}
NVIDIA_FITTED = list(reversed(_SMALLEST.values()))
NVIDIA_HELD_OUT = [row for row in (*CLOUD, *SUMMARIES) if row not in NVIDIA_FITTED]
