"""Step times that others have published, with the layouts under which they were measured.

What a source leaves open is assumed here and said in `assumed`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.simulation.operators import Program
from orchestrator.planner.simulation.step import step_time

MEGATRON = Program(width=2, dropout=True, gather_width=2, gradient_width=4, carried_width=2, compiled=True)
"""Megatron-LM in mixed precision: gradients are summed in fp32, weights gathered in 16 bits."""


@dataclass(frozen=True)
class Published:
    """A measured step: what was run, how, and the seconds that it took, with the memory of a rank where it is told;
    `per_node`, and `between` (bytes per second to other nodes) where they are not the profile's."""

    name: str
    source: str
    machine: str
    shape: ModelShape
    layout: Layout
    batch: int
    seconds: float
    program: Program = MEGATRON
    assumed: str = ""
    per_node: int = 0
    between: float = 0.0
    gigabytes: float = 0.0

    def seconds_on(self, machine: Machine) -> float:
        """Predicted seconds on such a machine."""
        link = replace(machine.between, bandwidth=self.between or machine.between.bandwidth)
        there = replace(machine, per_node=self.per_node or machine.per_node, between=link)
        return step_time(self.shape, self.layout, self.batch, there, self.program).seconds


def gpt(layers: int, hidden: int, heads: int, length: int = 2048, vocabulary: int = 51200) -> ModelShape:
    """A GPT of Megatron-LM: feed-forward blocks of 4 x hidden, tied embeddings."""
    weights = 12 * layers * hidden**2
    return ModelShape(
        parameters=weights + vocabulary * hidden + length * hidden + 13 * layers * hidden,
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, feedforward=4 * hidden, vocabulary=vocabulary,
        sequence_length=length, flops_per_token=6.0 * (weights + vocabulary * hidden) + 12.0 * layers * hidden * length,
        tied=True,
    )  # fmt: skip


def layer_weights(hidden: int, heads: int, keys: int, feedforward: int, gated: bool = True) -> int:
    """Weights of the products of a layer with grouped keys and values."""
    return 2 * hidden**2 + 2 * hidden * keys * (hidden // heads) + (3 if gated else 2) * hidden * feedforward


def llama(
    parameters: float,
    layers: int,
    hidden: int,
    heads: int,
    keys: int,
    feedforward: int,
    length: int,
    vocabulary: int = 128256,
    gated: bool = True,
) -> ModelShape:
    """A Llama model: gated feed-forward blocks, grouped keys and values, an output projection of its own."""
    weights = layers * layer_weights(hidden, heads, keys, feedforward, gated)
    return ModelShape(
        parameters=int(parameters), layers=layers, hidden=hidden, heads=heads, kv_heads=keys, feedforward=feedforward,
        vocabulary=vocabulary, sequence_length=length, gated=gated,
        flops_per_token=6.0 * (weights + vocabulary * hidden) + 12.0 * layers * hidden * length,
    )  # fmt: skip


def _ptdp(
    billions: str,
    heads: int,
    hidden: int,
    layers: int,
    tp: int,
    pp: int,
    gpus: int,
    batch: int,
    tflops: float,
) -> Published:
    """A row of table 1. Its TFLOP/s count a full recomputation (equation 3)."""
    shape = gpt(layers, hidden, heads)
    work = (
        96.0 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    )
    dp = gpus // (tp * pp)
    micro = MICRO[billions]
    even = layers % (2 * pp) == 0 and pp > 1 and batch // dp // micro % pp == 0
    layout = Layout(
        pp=pp, dp=dp, tp=tp, micro_batch=micro, recompute="full", schedule="interleaved" if even else "1f1b"
    )
    assumed = f"micro-batch {micro}" + (", two stages per rank" if even else "")
    source = "Narayanan et al., 2021, table 1"
    return Published(
        f"GPT {billions}B", source, "a100-80", shape, layout, batch, work / (gpus * tflops * 1e12),
        assumed=assumed,
    )  # fmt: skip


MICRO = {
    "1.7": 16, "3.6": 16, "7.5": 4, "18.4": 4, "39.1": 4, "76.1": 2, "145.6": 2, "310.1": 1, "529.6": 1, "1008": 1
}  # fmt: skip
"""Micro-batches of table 1, which does not give them."""

PTDP_1 = [
    _ptdp("1.7", 24, 2304, 24, 1, 1, 32, 512, 137),
    _ptdp("3.6", 32, 3072, 30, 2, 1, 64, 512, 138),
    _ptdp("7.5", 32, 4096, 36, 4, 1, 128, 512, 142),
    _ptdp("18.4", 48, 6144, 40, 8, 1, 256, 1024, 135),
    _ptdp("39.1", 64, 8192, 48, 8, 2, 512, 1536, 138),
    _ptdp("76.1", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    _ptdp("145.6", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    _ptdp("310.1", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    _ptdp("529.6", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    _ptdp("1008", 160, 25600, 128, 8, 64, 3072, 3072, 163),
]


def _sequence(
    name: str, layers: int, hidden: int, heads: int, pp: int, chunks: int, batch: int, micro: int,
    full: float, selective: float,
) -> list[Published]:  # fmt: skip
    shape = gpt(layers, hidden, heads)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    base = {"pp": pp, "tp": 8, "micro_batch": micro, "schedule": schedule, "virtual": max(chunks, 2)}
    layouts = [
        ("full recomputation", Layout(**base, recompute="full"), full),
        ("sequence, selective", Layout(**base, recompute="selective", sequence=True), selective),
    ]
    source = "Korthikanti et al., 2022, table 5"
    return [
        Published(f"GPT {name}, {how}", source, "a100-80", shape, layout, batch, seconds)
        for how, layout, seconds in layouts
    ]


SEQUENCE = [
    *_sequence("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    *_sequence("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    *_sequence("530B", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    *_sequence("1T", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
]


def _ptdp_175(gpus: int, tflops: float) -> Published:
    """A row of table 2 with 175 billion parameters, for which 96 GPUs hold a replica."""
    row = _ptdp("145.6", 96, 12288, 96, 8, 12, gpus, 1536, tflops)
    layout = replace(row.layout, micro_batch=1)
    source = "Narayanan et al., 2021, table 2"
    return replace(
        row, name=f"GPT 175B, {gpus} GPUs", source=source, layout=layout, assumed="two stages per rank"
    )


def _ptdp_530(gpus: int, tflops: float) -> Published:
    row = _ptdp("529.6", 128, 20480, 105, 8, 35, gpus, 2240, tflops)
    source = "Narayanan et al., 2021, table 2"
    return replace(row, name=f"GPT 530B, {gpus} GPUs", source=source, assumed="one stage per rank")


PTDP_2 = [
    *(_ptdp_175(gpus, tflops) for gpus, tflops in ((384, 153), (768, 149), (1536, 141))),
    *(_ptdp_530(gpus, tflops) for gpus, tflops in ((560, 171), (1120, 167), (2240, 159))),
]

TITAN = Program(width=2, gather_width=2, gradient_width=4, carried_width=2, products_again=0.5)
"""torchtitan: FSDP2 gathers in bfloat16 and sums in fp32; selective recomputation keeps every other product."""
COMPILED = replace(TITAN, compiled=True)
LLAMA_8B = llama(8.03e9, 32, 4096, 32, 8, 14336, 8192)
LLAMA_70B = llama(70.6e9, 80, 8192, 64, 8, 28672, 8192)


def _titan(
    name: str, machine: str, shape: ModelShape, layout: Layout, tokens: float, program: Program, source: str
) -> Published:
    """A row of tokens per second and GPU; every GPU computes one micro-batch a step."""
    batch = layout.dp * layout.micro_batch
    seconds = batch * shape.sequence_length / (tokens * layout.world)
    return Published(name, source, machine, shape, layout, batch, seconds, program)


_A100, _H100, _ASYNC = "torchtitan, 64 A100", "torchtitan, 2024-12", "torchtitan, 2025-06"
_SELECTIVE: dict[str, Any] = {"zero": 3, "recompute": "selective"}
_OLD, _500W = "a100-80-fused", "h100-500w"
_FSDP_8, _FSDP_128 = (Layout(dp=dp, micro_batch=2, **_SELECTIVE) for dp in (8, 128))
_TWO_D = Layout(dp=8, tp=8, micro_batch=12, sequence=True, **_SELECTIVE)
_FULL, _TWO_D_FULL = (
    Layout(dp=64, zero=3, recompute="full"),
    Layout(dp=32, tp=8, micro_batch=16, sequence=True, zero=3, recompute="full"),
)
TORCHTITAN = [
    _titan("Llama 3 8B, FSDP 64", _OLD, LLAMA_8B, Layout(dp=64, **_SELECTIVE), 2973, TITAN, _A100),
    _titan("Llama 3 70B, FSDP 64", _OLD, LLAMA_70B, _FULL, 331, TITAN, _A100),
    _titan("Llama 3.1 8B, FSDP 8", _500W, LLAMA_8B, _FSDP_8, 5762, TITAN, _H100),
    _titan("Llama 3.1 8B, FSDP 8, compiled", _500W, LLAMA_8B, _FSDP_8, 6667, COMPILED, _H100),
    _titan("Llama 3.1 8B, FSDP 128", _500W, LLAMA_8B, _FSDP_128, 5605, TITAN, _H100),
    _titan("Llama 3.1 8B, FSDP 128, compiled", _500W, LLAMA_8B, _FSDP_128, 6514, COMPILED, _H100),
    _titan("Llama 3 8B, FSDP 8, TP 8, compiled", _500W, LLAMA_8B, _TWO_D, 4378, COMPILED, _ASYNC),
    _titan("Llama 3 70B, FSDP 32, TP 8, compiled", _500W, LLAMA_70B, _TWO_D_FULL, 597.3, COMPILED, _ASYNC),
]


def _report(gpus: int, dp: int, batch: int, cp: int, length: int, tflops: float) -> Published:
    """A row of the Llama 3 report: 16 stages, TP 8, `batch` sequences a data-parallel rank."""
    shape = llama(405.9e9, 126, 16384, 128, 8, 53248, length)
    layout = Layout(
        pp=16, dp=dp, cp=cp, tp=8, micro_batch=1, schedule="interleaved", sequence=True, zero=1, virtual=8,
        first_less=1, last_less=1,
    )  # fmt: skip
    work = 6.0 * 405.9e9 + 6.0 * 126 * 16384 * length
    seconds = work * batch * dp * length / (gpus * tflops * 1e12)
    program = Program(2, gather_width=2, gradient_width=4, carried_width=2, compiled=True)
    return Published(
        f"Llama 3 405B, {gpus} GPUs, {length} tokens", "Llama 3 report, table 4", "h100", shape, layout,
        batch * dp, seconds, program, "eight stages per rank, micro-batch 1, causal FLOPs",
    )  # fmt: skip


REPORT = [_report(8192, 64, 32, 1, 8192, 430), _report(16384, 128, 16, 1, 8192, 400)]
ROWS = [*PTDP_1, *PTDP_2, *SEQUENCE, *TORCHTITAN, *REPORT]
