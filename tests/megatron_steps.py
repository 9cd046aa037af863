"""Steps under tensor, pipeline and expert parallelism that others have published: BigScience and NVIDIA on A100,
nanotron and NVIDIA on H100, SimuMax on B200. Torch-free.

Profiles are fitted to the larger of SimuMax's two models alone, all else is held out.
"""

from __future__ import annotations

from dataclasses import replace

from published_steps import MEGATRON, Published, gpt, layer_weights, llama

from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.simulation.operators import Program

OMNI_PATH = 5e9
"""Bytes per second of an A100 of Jean Zay to other nodes: 4 x 100 Gb/s a node of eight, 80 % of it."""
_BLOOM = {14336: 72, 13312: 84, 12288: 96}


def _bloom(
    hidden: int, dp: int, tp: int, pp: int, micro: int, batch: int, seconds: float, gigabytes: int = 0
) -> Published:
    """A row of BigScience's search for the layout of BLOOM: 2,048 tokens, 64 heads, a vocabulary of 250 thousand, full
    recomputation, ZeRO 1, gradients in fp16; those of 2022-02-25 and after, when the links had been mended."""
    layers = _BLOOM[hidden]
    shape = gpt(layers, hidden, 64, 2048, 250880)
    layout = Layout(pp=pp, dp=dp, tp=tp, micro_batch=micro, recompute="full", zero=1)
    program = replace(MEGATRON, dropout=False, gradient_width=2)
    return Published(
        f"GPT {shape.parameters / 1e9:.0f}B, {hidden} wide", "BigScience, 2022-02", "a100-80", shape, layout, batch,
        seconds, program, between=OMNI_PATH, gigabytes=gigabytes,
    )  # fmt: skip


BIGSCIENCE = [
    _bloom(*row)
    for row in (
        (14336, 8, 8, 6, 4, 2048, 114.11, 55), (14336, 8, 8, 6, 6, 2016, 123.57, 66), (14336, 4, 8, 12, 4, 1568, 92.75),
        (14336, 4, 8, 12, 4, 2048, 117.07, 49), (14336, 4, 8, 12, 2, 1568, 99.93), (14336, 4, 8, 12, 2, 2048, 128.82),
        (14336, 6, 8, 8, 4, 2016, 113.16, 52), (14336, 12, 8, 4, 2, 2016, 125.52, 53),
        (14336, 12, 8, 4, 4, 2016, 114.81, 59), (14336, 24, 8, 2, 1, 2016, 145.45, 65),
        (14336, 24, 8, 2, 2, 2016, 136.13, 76), (14336, 8, 4, 12, 4, 2048, 111.89, 60),
        (14336, 8, 4, 12, 2, 2048, 110.48, 44), (14336, 16, 4, 6, 4, 2048, 117.11, 75),
        (14336, 16, 4, 6, 2, 2048, 111.71, 57), (14336, 16, 2, 12, 2, 2048, 112.50, 63),
        (14336, 8, 2, 24, 1, 2048, 119.53, 44), (14336, 8, 2, 24, 2, 2048, 122.75, 53),
        (14336, 4, 4, 24, 1, 2048, 130.60), (12288, 8, 1, 48, 1, 2048, 142.17, 58),
        (13312, 8, 4, 12, 2, 2048, 103.82), (13312, 8, 4, 12, 4, 2048, 113.21), (13312, 8, 8, 6, 2, 2048, 129.61),
    )
]  # fmt: skip


def _dao(
    layers: int, hidden: int, heads: int, length: int, fused: bool, tflops: float
) -> Published:  # fmt: skip
    """A row of one node of eight, with or without the fused kernel of attention."""
    shape = gpt(layers, hidden, heads, length, 50304)
    micro = 8192 // length
    layout, batch = Layout(dp=8, micro_batch=micro), 64 * micro
    work = batch * length * (6.0 * shape.parameters + 12.0 * layers * hidden * length)
    return Published(
        f"GPT-3 {'1.3B' if layers == 24 else '2.7B'}, {length} tokens", "Dao, 2023, table 1",
        "a100-80-fused" if fused else "a100-80", shape, layout, batch, work / (8 * tflops * 1e12),
        replace(MEGATRON, dropout=False), f"micro-batch {micro}, eight a step",
    )  # fmt: skip


DAO = [
    _dao(layers, hidden, heads, length, fused, tflops)
    for layers, hidden, heads, length, plain, with_kernel in (
        (24, 2048, 16, 2048, 142, 196), (24, 2048, 16, 8192, 72, 220), (32, 2560, 32, 2048, 149, 205),
        (32, 2560, 32, 8192, 80, 225),
    )
    for fused, tflops in ((False, plain), (True, with_kernel))
]  # fmt: skip

NANO = Program(width=2, gather_width=2, gradient_width=4, carried_width=2)
"""nanotron: gradients are kept and summed in fp32; flash attention and fused norms, nothing compiled."""
_LLAMAS = {
    "1.34B": (16, 2048, 32, 8192, True), "3.57B": (28, 3072, 32, 8192, True), "8.86B": (32, 4096, 32, 14336, False),
    "80B": (80, 8192, 64, 28672, False),
}  # fmt: skip
_H100 = 989.5e12


def _llama(name: str) -> ModelShape:
    """A Llama with as many keys as queries and a vocabulary of 131,072, 4,096 tokens."""
    layers, hidden, heads, feedforward, tied = _LLAMAS[name]
    vocabulary, length = 131072, 4096
    weights = layers * (4 * hidden**2 + 3 * hidden * feedforward)
    return ModelShape(
        parameters=weights + (1 if tied else 2) * vocabulary * hidden, layers=layers, hidden=hidden, heads=heads,
        kv_heads=heads, feedforward=feedforward, vocabulary=vocabulary, sequence_length=length, gated=True, tied=tied,
        flops_per_token=6.0 * (weights + vocabulary * hidden) + 12.0 * layers * hidden * length,
    )  # fmt: skip


def _nano(
    name: str, dp: int, tp: int, pp: int, parts: int, micro: int, zero: int, share: float, gigabytes: float
) -> Published:
    """A row by its share of the peak, of which it counts whole attention."""
    shape = _llama(name)
    layout = Layout(pp=pp, dp=dp, tp=tp, micro_batch=micro, zero=zero, sequence=tp > 1)
    batch = dp * parts * micro
    seconds = shape.flops_per_token * batch * 4096 / (share / 100 * _H100 * layout.world)
    return Published(
        f"Llama {name}, nanotron", "nanotron, 2025-02", "h100", shape, layout, batch, seconds, NANO,
        gigabytes=gigabytes,
    )  # fmt: skip


NANOTRON = [
    _nano(*row)
    for row in (
        ("1.34B", 4, 1, 2, 16, 4, 1, 44.32, 41.76), ("3.57B", 4, 1, 2, 32, 2, 1, 46.68, 56.87),
        ("8.86B", 2, 1, 4, 128, 1, 1, 45.22, 63.07), ("1.34B", 8, 1, 2, 32, 1, 1, 41.59, 19.45),
        ("3.57B", 8, 1, 2, 16, 2, 1, 43.77, 54.31), ("8.86B", 4, 4, 1, 16, 4, 1, 43.94, 58.34),
        ("1.34B", 16, 1, 2, 16, 1, 1, 38.38, 16.39), ("3.57B", 16, 1, 2, 8, 2, 1, 40.39, 53.33),
        ("8.86B", 16, 1, 2, 16, 1, 1, 43.31, 61.10), ("80B", 1, 8, 4, 256, 1, 0, 14.76, 65.97),
        ("1.34B", 32, 1, 2, 8, 1, 1, 32.47, 16.27), ("3.57B", 32, 1, 2, 8, 1, 1, 35.53, 36.73),
        ("8.86B", 32, 1, 2, 8, 1, 1, 39.50, 59.09), ("80B", 1, 4, 16, 256, 1, 0, 30.65, 63.07),
        ("1.34B", 64, 2, 1, 1, 4, 0, 29.46, 38.84), ("3.57B", 32, 4, 1, 1, 8, 0, 34.59, 66.20),
        ("8.86B", 16, 8, 1, 2, 8, 0, 36.33, 66.88), ("80B", 1, 4, 32, 256, 1, 0, 34.29, 61.18),
        ("1.34B", 64, 4, 1, 1, 4, 0, 23.20, 19.57), ("3.57B", 64, 4, 1, 1, 4, 0, 26.77, 38.98),
        ("8.86B", 32, 8, 1, 1, 8, 0, 32.71, 63.39), ("80B", 4, 4, 16, 64, 1, 1, 30.75, 64.21),
        ("1.34B", 128, 2, 2, 1, 2, 1, 5.25, 8.40), ("3.57B", 128, 4, 1, 1, 2, 1, 10.49, 16.42),
        ("8.86B", 128, 4, 1, 1, 2, 0, 18.69, 57.76), ("80B", 32, 16, 1, 4, 2, 1, 17.79, 53.46),
        ("3.57B", 1, 2, 1, 1, 3, 0, 363.66e2 / 989.5, 0), ("3.57B", 1, 4, 1, 1, 9, 0, 345.51e2 / 989.5, 0),
        ("3.57B", 1, 8, 1, 1, 18, 0, 279.5e2 / 989.5, 0), ("3.57B", 1, 16, 1, 1, 40, 0, 158.1e2 / 989.5, 0),
    )
]  # fmt: skip


def _routed(
    layers: int, hidden: int, heads: int, keys: int, size: int, vocabulary: int, experts: int, each: int, columns: int
) -> ModelShape:  # fmt: skip
    """A model of `experts` in every layer, of which a token uses `each`; 4,096 tokens."""
    own = layers * 3 * hidden * columns
    rest = layers * 2 * hidden * size * (heads + keys) + 2 * vocabulary * hidden
    return ModelShape(
        parameters=rest + experts * own, layers=layers, hidden=hidden, heads=heads, kv_heads=keys, head_dim=size,
        vocabulary=vocabulary, feedforward=0, gated=True, sequence_length=4096, experts=experts,
        experts_per_token=each, expert_layers=layers, expert_feedforward=columns,
        expert_share=experts * own / (rest + experts * own),
        flops_per_token=6.0 * (rest - vocabulary * hidden + each * own) + 12.0 * layers * heads * size * 4096,
    )  # fmt: skip


GPT_OSS_120B = _routed(36, 2880, 64, 8, 64, 201088, 128, 4, 2880)
GPT_OSS_20B = _routed(24, 2880, 64, 8, 64, 201088, 32, 4, 2880)
QWEN3_30B = _routed(48, 2048, 32, 4, 128, 151936, 128, 8, 768)
FUSED = replace(NANO, compiled=True)


def _nvidia(
    name: str,
    source: str,
    shape: ModelShape,
    layout: Layout,
    batch: int,
    seconds: float,
    program: Program = FUSED,
) -> Published:
    assumed = "balanced experts are measured, random routing is predicted"
    return Published(name, source, "h100", shape, layout, batch, seconds, program, assumed)


def _bridge(release: str, batch: int, micro: int, tokens: int) -> Published:
    layout = Layout(pp=4, dp=16, ep=8, zero=1, micro_batch=micro)
    seconds = batch * 4096 / (tokens * 64)
    return _nvidia("GPT-OSS 120B", f"Megatron-Bridge, {release}", GPT_OSS_120B, layout, batch, seconds)


_AUTO = "NeMo AutoModel, 2025-10"
NVIDIA = [
    _bridge("25.11", 512, 4, 5630),
    _bridge("26.02.01", 1280, 1, 5984),
    _nvidia("GPT-OSS 120B", _AUTO, GPT_OSS_120B, Layout(dp=64, ep=64, zero=3, micro_batch=2), 512, 4.30),
    _nvidia("Qwen3 30B-A3B", _AUTO, QWEN3_30B, Layout(dp=8, ep=8, zero=3, micro_batch=4), 512, 21.773),
    _nvidia("GPT-OSS 20B", _AUTO, GPT_OSS_20B, Layout(dp=8, ep=8, zero=3, micro_batch=2), 256, 10.04),
]  # fmt: skip
"""Rows in bfloat16 of NVIDIA's summaries; most are in 8 bits, which this project does not train in."""


NEMO_PROGRAM = replace(MEGATRON, gradient_width=2)
"""NeMo with half-precision gradients, which its optimiser sums in 16 bits."""


def _nemo(
    name: str, shape: ModelShape, layout: Layout, batch: int, seconds: float, assumed: str = ""
) -> Published:
    """A row of NeMo Megatron's README, whose configurations have the layout; attention writes its scores."""
    source = "NeMo Megatron, 2022-09 to 2023-07"
    return Published(name, source, "a100-80", shape, layout, batch, seconds, NEMO_PROGRAM, assumed)


def _bert(layers: int, hidden: int, heads: int) -> ModelShape:
    return gpt(layers, hidden, heads, 512, 30592)


_GPT_5B, _GPT_175B, _BERT_4B = gpt(24, 4096, 32), gpt(96, 12288, 96), _bert(48, 2560, 32)
NEMO = [
    *(
        _nemo("GPT 5B, NeMo", _GPT_5B, Layout(dp=8 * nodes, zero=1, micro_batch=2), 2048, 2048 * 2048 / tokens)
        for nodes, tokens in ((1, 40345), (2, 79815), (4, 161754), (8, 312774), (16, 659481), (32, 1159288))
    ),
    *(
        _nemo(
            "GPT 175B, NeMo", _GPT_175B,
            Layout(dp=nodes // 8, tp=8, pp=8, zero=int(nodes > 8), micro_batch=2, sequence=True, recompute="selective"),
            2048, 2048 * 2048 / tokens, "one stage per rank",
        )
        for nodes, tokens in ((8, 7500), (16, 14950), (32, 29537), (64, 58211), (128, 109684))
    ),
    *(
        _nemo("BERT 4B, NeMo", _BERT_4B, Layout(dp=8 * nodes, zero=1, micro_batch=8), 2048, 2048 * 512 / tokens)
        for nodes, tokens in ((1, 57287), (2, 108695), (4, 215358), (8, 393167), (16, 728178))
    ),
    _nemo("BERT 110M, NeMo", _bert(12, 768, 12), Layout(dp=64, zero=1, micro_batch=4), 256, 0.076),
    _nemo(
        "BERT 20B, NeMo", _bert(48, 6144, 96), Layout(dp=16, tp=4, pp=4, zero=1, micro_batch=4, sequence=True),
        4096, 6.79, "one stage per rank",
    ),
    _nemo(
        "BERT 100B, NeMo", _bert(96, 9216, 96), Layout(dp=16, tp=4, pp=16, zero=1, micro_batch=8, sequence=True),
        4096, 7.54, "one stage per rank",
    ),
]  # fmt: skip
"""Rows in bfloat16 of NVIDIA's tables for A100 of 80 GB, of nodes of eight."""


def _simumax(billions: int, tp: int, pp: int, parts: int, milliseconds: float, gibibytes: float) -> Published:
    """A row of a few layers of Llama 3 with Megatron-LM and TransformerEngine, 4,096 tokens."""
    sizes = {70: (12, 8192, 64, 8, 28672), 405: (4, 16384, 128, 16, 53248)}
    layers, hidden, heads, keys, feedforward = sizes[billions]
    whole = layers * layer_weights(hidden, heads, keys, feedforward) + 2 * 128256 * hidden
    shape = llama(whole, layers, hidden, heads, keys, feedforward, 4096)
    dp = 8 // (tp * pp)
    layout = Layout(pp=pp, dp=dp, tp=tp, sequence=tp > 1, zero=1)
    name, source = f"Llama 3 {billions}B, {layers} layers", "SimuMax 1.2, measured"
    return Published(
        name, source, "b200", shape, layout, dp * parts, milliseconds / 1e3, FUSED,
        gigabytes=gibibytes * 2**30 / 1e9,
    )  # fmt: skip


SIMUMAX = [
    _simumax(*row)
    for row in (
        (70, 1, 2, 4, 843.0, 66.55), (70, 2, 1, 4, 725.5, 60.68), (70, 4, 1, 4, 409.8, 39.07),
        (70, 8, 1, 4, 280.9, 28.29), (70, 1, 2, 8, 1476.8, 66.55), (70, 2, 1, 8, 1387.0, 60.68),
        (70, 4, 1, 8, 765.6, 39.07), (70, 8, 1, 8, 556.7, 28.29), (70, 1, 2, 32, 5436.5, 66.55),
        (70, 2, 1, 32, 5376.5, 60.68), (70, 4, 1, 32, 2964.6, 39.07), (70, 8, 1, 32, 2073.7, 28.29),
        (405, 1, 2, 4, 1074.6, 87.08), (405, 2, 1, 4, 907.3, 81.59), (405, 4, 1, 4, 476.0, 52.89),
        (405, 8, 1, 4, 258.8, 38.57), (405, 1, 2, 8, 1935.4, 87.08), (405, 2, 1, 8, 1716.8, 81.59),
        (405, 4, 1, 8, 899.6, 52.89), (405, 8, 1, 8, 488.1, 38.57), (405, 1, 2, 32, 7046.4, 87.08),
        (405, 2, 1, 32, 6604.1, 81.59), (405, 4, 1, 32, 3455.4, 52.89), (405, 8, 1, 32, 1901.8, 38.57),
    )
]  # fmt: skip
MEGATRON_FITTED = [row for row in SIMUMAX if "405B" in row.name]
BLIND = [*DAO, *BIGSCIENCE, *NEMO, *NANOTRON, *NVIDIA, *(row for row in SIMUMAX if "405B" not in row.name)]
