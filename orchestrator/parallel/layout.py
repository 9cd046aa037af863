"""Layouts: the degrees of parallelism, the coordinate of every rank, and the rules that make a layout legal.

Standard library only, so that the job file, the planner and the controller need neither torch nor ray.
Rank order, slowest to fastest: pp, dp, cp, tp. The ranks of a tensor-parallel group are consecutive, so that they are
on one node, where bandwidth is highest (Narayanan et al., 2021, PTD-P, section 3.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from orchestrator.parallel.model_shape import ModelShape as ModelShape
from orchestrator.parallel.stages import have_layers, layers_by_stage, layers_of

AXES = ("pp", "dp", "cp", "tp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
SEVERAL_STAGES = ("interleaved", "zero_bubble", "zbv")
"""Schedules under which each rank runs several stages; ZB-V runs two."""
SPLIT = ("zero_bubble", "zbv")
"""Schedules that run the backward pass in two halves: for the input of a stage, and later for its weights."""

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are reduced together (Li et al., 2020, section 3.2.3)."""
PART_BYTES = 2**20
"""Minimum bytes of a bucket for each rank. With many ranks the latency of a ring is long, so buckets grow with them."""


def bucket_bytes(ranks: int) -> int:
    """Return the bytes of gradients that `ranks` ranks reduce together."""
    return max(BUCKET_BYTES, ranks * PART_BYTES)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and how the engine runs.

    Expert-parallel groups consist of data-parallel ranks. `dp` counts all data-parallel ranks, whatever the ZeRO stage.

    Attributes:
        shard: number of replicas over which ZeRO 2 and 3 shard one copy of the weights; 0 for all.
        virtual: stages of a rank under schedules that interleave them.
        first_less, last_less: number of layers that the embedding and the head count as when layers are divided into
            stages.
        recompute_layers: number of each stage's first layers that are recomputed; 0 for all.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"
    engine: str = "torch"
    schedule: str = "1f1b"
    sequence: bool = False
    offload: str = "none"
    shard: int = 0
    virtual: int = 2
    first_less: int = 0
    last_less: int = 1
    recompute_layers: int = 0

    @property
    def replicas(self) -> int:
        """Number of ranks with the same dense parameters and different tokens."""
        return self.dp * self.cp

    @property
    def sharded(self) -> int:
        """Number of ranks over which ZeRO shards."""
        return self.shard or self.dp * self.cp

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages(self) -> int:
        """Number of pipeline stages: several per rank under schedules that interleave them."""
        return self.pp * (self.virtual if self.pp > 1 and self.schedule in SEVERAL_STAGES else 1)

    def layers_of(self, layers: int, stage: int) -> tuple[int, int]:
        """Return (first layer, number of layers) of a stage.

        Args:
            layers: number of layers of the model.
            stage: number of the stage, from 0.
        """
        return layers_of(layers, stage, self.stages, self.first_less, self.last_less)

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Return the stages that the rank at an index of the pipeline axis runs, in order.

        ZB-V runs the second half of the stages back to the first rank (Qi et al., 2024, section 6).
        """
        if self.stages == self.pp:
            return [pipeline_rank]
        if self.schedule == "zbv":
            return [pipeline_rank, self.stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.stages, self.pp))

    def pipeline_rank_of(self, stage: int) -> int:
        """Return the index on the pipeline axis of the rank that runs a stage."""
        if self.schedule == "zbv" and self.pp > 1:
            return min(stage, self.stages - 1 - stage)
        return stage % self.pp

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on every axis."""
        result = {}
        # The coordinate is the rank in mixed radix: tp is the lowest digit, pp the highest.
        for axis in reversed(AXES):
            rank, result[axis] = divmod(rank, getattr(self, axis))
        return {axis: result[axis] for axis in AXES}

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; axes that are not given are 0."""
        number = 0
        for axis in AXES:
            number = number * getattr(self, axis) + coordinate.get(axis, 0)
        return number

    def groups(self, axis: str) -> Iterator[list[int]]:
        """Yield the groups of ranks that differ only in their index on `axis`."""
        for rank in range(self.world):
            coordinate = self.coordinate(rank)
            if coordinate[axis] == 0:
                yield [self.rank(**{**coordinate, axis: i}) for i in range(getattr(self, axis))]

    def accumulation(self, global_batch: int) -> int:
        """Return the number of micro-batches that each data-parallel rank computes in a step.

        Where the ranks do not divide the micro-batches, some ranks compute one without labels at the end.
        """
        return -(-(global_batch // self.micro_batch) // self.dp)

    def problems(self, shape: ModelShape, global_batch: int) -> list[str]:
        """Return one line with a hint for every rule that this layout breaks for a model; empty if it is legal.

        Args:
            shape: the sizes of the model.
            global_batch: number of samples per step.
        """
        return [
            *split_problems(self, shape),
            *_teacher_problems(self, shape),
            *_combinations(self, shape),
            *_engine(self),
            *batch_problems(self, global_batch, shape.even_shares),
        ]

    def but(self, **changes: Any) -> Layout:
        """Return a copy with these changes.

        A search makes hundreds of thousands of copies, and `dataclasses.replace` takes ten times as long.
        """
        layout = object.__new__(Layout)
        # Around the frozen dataclass's own constructor, which sets each field by `object.__setattr__`.
        layout.__dict__.update(self.__dict__, **changes)
        return layout

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data."""
        return dataclasses.asdict(self)

    @property
    def pins(self) -> dict[str, Any]:
        """The layout as the job file's key `parallel`: everything but the width, which follows from the workers."""
        result = {name: value for name, value in self.to_json().items() if name != "dp"}
        return result | {"shard": self.shard or None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Restore a layout; the inverse of `to_json`."""
        return cls(**data)

    def __str__(self) -> str:
        extra = [] if self.engine == "torch" else [self.engine]
        degrees = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1 or axis == "dp"]
        extra += [f"ep{self.ep}"] if self.ep > 1 else []
        extra += [self.schedule] if self.pp > 1 else []
        extra += ["sequence"] if self.sequence else []
        several = self.pp > 1 and self.schedule in SEVERAL_STAGES
        extra += [f"virtual{self.virtual}"] if several and self.virtual != 2 else []
        cut = self.pp > 1 and (self.first_less, self.last_less) != (0, 1)
        extra += [f"less{self.first_less}-{self.last_less}"] if cut else []
        again = f"recompute-{self.recompute}{self.recompute_layers or ''}"
        extra += [again] if self.recompute != "none" else []
        extra += [f"offload-{self.offload}"] if self.offload != "none" else []
        extra += [f"shard{self.shard}"] if self.shard else []
        return " ".join([*degrees, *extra, f"zero{self.zero}", f"mb{self.micro_batch}"])


def _indivisible(degree: int, size: int, axis: str, name: str) -> list[str]:
    if size % degree == 0:
        return []
    fits = ", ".join(str(d) for d in divisors(size))
    return [f"{axis} {degree} does not divide the model's {size} {name}; choose {axis} from {fits}"]


def split_problems(layout: Layout, shape: ModelShape) -> list[str]:
    """Return the problems of splitting the model by each degree, one line each.

    Args:
        layout: the layout to check.
        shape: the sizes of the model, or of a teacher in the same layout.
    """
    if shape.no_model_split:
        cut = {"tp": "tensors", "pp": "layers", "ep": "experts", "cp": "the sequence"}
        why = {"tp": shape.no_tensor_split, "pp": shape.no_pipeline_split}
        return [
            f"{axis} {getattr(layout, axis)} divides {divided}, and {why.get(axis) or shape.no_model_split}; "
            f"set {axis} to 1"
            for axis, divided in cut.items()
            if getattr(layout, axis) > 1
        ]
    if shape.no_tensor_split and layout.tp > 1:
        return [f"tp {layout.tp} divides tensors, and {shape.no_tensor_split}; set tp to 1"]
    if shape.no_pipeline_split and layout.pp > 1:
        return [f"pp {layout.pp} divides layers, and {shape.no_pipeline_split}; set pp to 1"]
    result = [*_tensor_split_problems(layout, shape), *_stage_problems(layout, shape)]
    if layout.cp > 1 and shape.no_context_split:
        result.append(f"cp {layout.cp} splits the sequence, and {shape.no_context_split}; set cp to 1")
    elif layout.cp > 1:
        result += _indivisible(2 * layout.cp, shape.sequence_length, "2 x cp", "positions in a sequence")
    if layout.ep > 1 and not shape.experts:
        result.append(f"ep {layout.ep} needs experts, but this model is dense; set ep to 1")
    elif layout.ep > 1:
        result += _indivisible(layout.ep, shape.experts, "ep", "experts")
    if layout.dp % layout.ep:
        result.append(
            f"ep {layout.ep} does not divide the {layout.dp} data-parallel ranks it borrows; lower ep"
        )
    return result


def _teacher_problems(layout: Layout, shape: ModelShape) -> list[str]:
    """Return why the teacher of a distilled student cannot run in its layout."""
    teacher = shape.teacher
    if teacher is None:
        return []
    result = []
    if layout.engine == "deepspeed":
        result.append("the DeepSpeed engine holds no teacher; set engine to torch")
    if shape.relation_heads:
        result += _indivisible(layout.tp, shape.relation_heads, "tp", "relation heads")
    # A dense teacher is whole on each rank of an expert group.
    same = layout if teacher.experts else layout.but(ep=1)
    return result + [f"of distill.teacher: {problem}" for problem in split_problems(same, teacher)]


def _tensor_split_problems(layout: Layout, shape: ModelShape) -> list[str]:
    """Return the sizes of the model that the tensor-parallel degree does not divide."""
    result = []
    if shape.heads_split:
        result += _indivisible(layout.tp, shape.heads, "tp", "attention heads")
        result += _indivisible(layout.tp, shape.kv_heads, "tp", "key-value heads")
    result += _indivisible(layout.tp, shape.feedforward, "tp", "feed-forward columns")
    if shape.generator:
        result += _indivisible(layout.tp, shape.generator_heads, "tp", "attention heads of the generator")
        result += _indivisible(
            layout.tp, shape.generator_feedforward, "tp", "feed-forward columns of the generator"
        )
    if shape.experts:
        result += _indivisible(layout.tp, shape.expert_feedforward, "tp", "columns of an expert")
    if shape.quantised_group and layout.tp > 1 and not result:
        result += _cut_groups(layout.tp, shape)
    if not shape.uneven_vocabulary:
        result += _indivisible(
            layout.tp, shape.vocabulary, "tp", "tokens of the vocabulary, which the generator samples from"
        )
    return result


def _cut_groups(tp: int, shape: ModelShape) -> list[str]:
    """Return the problem of a degree that divides rows of weights within a group that shares a scale."""
    row_sizes = [shape.feedforward, *([shape.heads * shape.head_size] if shape.heads_split else [])]
    group = shape.quantised_group
    return [
        f"tp {tp} cuts rows of {size} weights within groups of {group}, which share a scale; lower tp, or choose a "
        "smaller quantize.group, or row"
        for size in row_sizes
        if size % (tp * group)
    ][:1]


def _stage_problems(layout: Layout, shape: ModelShape) -> list[str]:
    """Return the problem of a pipeline with a stage that has no layer, unless it is the first or the last one."""
    if layout.pp == 1:
        return []
    layers = shape.stages or shape.layers
    stages = layout.stages
    counts = layers_by_stage(layers, stages, layout.first_less, layout.last_less)
    if have_layers(counts, shape.bare_ends):
        return []
    if stages <= layers:
        number = counts.index(0, int(shape.bare_ends))
        ends = ", which only the first and the last may lack" if shape.bare_ends else ""
        return [
            f"first_less {layout.first_less} and last_less {layout.last_less} leave stage {number} of {stages} "
            f"none of the {layers} layers{ends}; lower them"
        ]
    per_rank = f", {layout.virtual} per rank under {layout.schedule}" if stages > layout.pp else ""
    max_pp = layers // (stages // layout.pp) or 1
    other = ", or the schedule 1f1b, with one stage per rank" if layout.pp <= layers and per_rank else ""
    if shape.bare_ends and stages <= layers + 2:
        other += ", or set first_less and last_less to 1: the first and the last stage then have no layer"
    return [
        f"pp {layout.pp} makes {stages} stages{per_rank}, but the model can be cut into {layers}; "
        f"choose pp up to {max_pp}{other}"
    ]


def _combinations(layout: Layout, shape: ModelShape) -> list[str]:
    """Return the options that exclude each other. Torch would run some of these without an error and give wrong
    results.
    """
    result = []
    if layout.sequence and layout.tp == 1:
        result.append("sequence parallelism needs tp above 1; set sequence to false")
    elif layout.sequence and shape.no_sequence_split:
        result.append(f"sequence slices the residuals, but {shape.no_sequence_split}; set sequence to false")
    elif layout.sequence:
        result += _indivisible(
            layout.tp * layout.cp, shape.sequence_length, "tp x cp", "positions in a sequence"
        )
    if layout.shard and layout.zero < 2:
        result.append(
            f"shard says over how many replicas ZeRO 2 and 3 divide, but zero is {layout.zero}; set zero to 3, or "
            "leave shard out"
        )
    elif layout.shard and layout.replicas % layout.shard:
        result += _indivisible(layout.shard, layout.replicas, "shard", "replicas")
    elif layout.shard and layout.shard % (layout.ep * layout.cp):
        multiple = layout.ep * layout.cp
        result.append(
            f"shard {layout.shard} must be a multiple of ep x cp = {multiple}, because each sharded copy holds all "
            f"experts and whole sequences; choose a multiple of {multiple}"
        )
    result += _cut(layout, shape)
    if layout.recompute != "none" and shape.no_recompute:
        result.append(f"recompute runs layers a second time, but {shape.no_recompute}; set recompute to none")
    return result


def _cut(layout: Layout, shape: ModelShape) -> list[str]:
    """Return the keys that say how a pipeline is cut or recomputed, where nothing is."""
    result = []
    if layout.virtual != 2 and (layout.pp == 1 or layout.schedule not in ("interleaved", "zero_bubble")):
        result.append(
            f"virtual {layout.virtual} is for pipelines whose ranks interleave stages; set schedule to interleaved or "
            "zero_bubble, or leave virtual out"
        )
    if layout.recompute_layers and layout.recompute == "none":
        result.append(
            "recompute_layers is the number of recomputed layers of a stage, but recompute is none; set recompute to "
            "full or selective, or leave it out"
        )
    if (layout.first_less, layout.last_less) == (0, 1):
        return result
    if layout.pp == 1:
        result.append("first_less and last_less cut a pipeline, but pp is 1; leave them out")
    return result


def batch_problems(layout: Layout, global_batch: int, even_shares: str = "") -> list[str]:
    """Return the problems of dividing the global batch into micro-batches that fill the pipeline.

    Args:
        layout: the layout.
        global_batch: samples of a step.
        even_shares: why all data-parallel ranks must compute equally many samples; empty if they need not.
    """
    micro_batches, remainder = divmod(global_batch, layout.micro_batch)
    if layout.engine == "deepspeed":
        even_shares = even_shares or "DeepSpeed counts the micro-batches of a step for all ranks"
    if remainder or micro_batches < layout.dp or (even_shares and micro_batches % layout.dp):
        why = f" ({even_shares})" if even_shares and not remainder and micro_batches >= layout.dp else ""
        return [
            f"global_batch {global_batch} is not a multiple of {layout.dp} data-parallel ranks x "
            f"micro-batch {layout.micro_batch}{why}; choose a width or micro-batch that divides it"
        ]
    parts, pp = layout.accumulation(global_batch), layout.pp
    if pp == 1:
        return []
    # torch's 1F1B refuses fewer micro-batches than stages, because its warm-up on the first rank needs one for each
    # stage. Schedules with several stages per rank warm up on what there is.
    if layout.schedule == "1f1b" and parts < pp:
        return [
            f"schedule 1f1b needs at least pp {pp} micro-batches, and there are {parts}; lower micro_batch, or set "
            "schedule to gpipe or zbv"
        ]
    rounds = parts // round_length(pp, parts)
    if layout.schedule in ("interleaved", "zero_bubble") and parts % rounds:
        return [
            f"schedule {layout.schedule} runs micro-batches in equal rounds of at least pp {pp}, and {rounds} rounds "
            f"do not divide the {parts} there are; choose another micro_batch, or set schedule to 1f1b"
        ]
    return []


def round_length(ranks: int, parts: int) -> int:
    """Return how many micro-batches an interleaved schedule runs through a stage before the rank turns to its next
    stage: as many as ranks (Narayanan et al., 2021, section 2.2), or as many more as make equal rounds of all.

    torch's schedules take every number of micro-batches that the rounds divide, such as 3 or 10 on 4 ranks
    (`ScheduleInterleaved1F1B`).

    Args:
        ranks: ranks of the pipeline.
        parts: micro-batches, at least 1.
    """
    return parts // max(1, parts // ranks)


def _engine(layout: Layout) -> list[str]:
    """Return the options that the layout's engine does not support."""
    if layout.engine == "torch":
        if layout.offload != "parameters":
            return []
        return ["offload parameters is DeepSpeed's alone; set engine to deepspeed, or offload to optimizer"]
    result = [
        f"the DeepSpeed engine is data parallel only, but {axis} is {getattr(layout, axis)}; "
        f"set {axis} to 1, or engine to torch"
        for axis in ("pp", "tp", "cp", "ep")
        if getattr(layout, axis) > 1
    ]
    if layout.zero == 0:
        result.append(
            "the DeepSpeed engine shards at least optimiser state; set zero to 1, 2 or 3, or engine to torch"
        )
    if layout.shard:
        result.append("only the torch engine supports shard; leave it out, or set engine to torch")
    if layout.offload == "parameters" and layout.zero != 3:
        result.append(
            "offload parameters needs weights that are sharded over ranks; set zero to 3, or offload to optimizer"
        )
    return result


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))
