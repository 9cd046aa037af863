"""The features of a job that an engine does not support, whatever the model. They are refused before anything starts.

Rules about the layout alone are in `layout`. Torch-free and ray-free.
"""

from __future__ import annotations

from orchestrator.config.workload import WorkloadSpec
from orchestrator.parallel.layout import SPLIT, Layout
from orchestrator.train.config import TrainSpec
from workloads.own.object_reference import is_object_reference


def engine_problems(
    train: TrainSpec,
    workload: WorkloadSpec,
    on_gpu: float,
    layout: Layout,
    prunes: bool = False,
    verifies: bool = False,
    speaks: bool = False,
) -> list[str]:
    """Return every reason why the layout's engine cannot run this job, each with a hint; empty if it can.

    Args:
        train: the key `train` of the job.
        workload: the key `workload`.
        on_gpu: number of GPUs per worker, 0 or 1.
        layout: the layout.
        prunes: whether the job prunes weights.
        verifies: whether it computes steps again.
        speaks: whether it continues prompts while it trains.
    """
    problems = []
    if train.compile and layout.pp > 1 and layout.schedule in SPLIT:
        problems.append(
            f"schedule {layout.schedule} splits the backward pass, which compiled blocks cannot; "
            "set train.compile to false"
        )
    if speaks and is_object_reference(workload.model) and layout.pp > 1:
        problems.append(
            "evaluate.samples calls logits(batch) of the whole own model, which a pipeline cuts; set pp to 1, or leave "
            "evaluate.samples out"
        )
    if layout.offload != "none" and not on_gpu:
        problems.append("offload moves state off a GPU, but these workers have no GPU; set offload to none")
    if train.sequence_warmup:
        problems += _with_sequence_warmup(train, layout)
    if train.layer_statistics and train.layer_statistics.activations and train.compile:
        problems.append(
            "layer_statistics.activations reads what layers return, which compiled layers do not show; set it or "
            "train.compile to false"
        )
    if layout.engine == "deepspeed":
        problems += _by_deepspeed(train, layout)
        if train.layer_statistics:
            problems.append(
                "DeepSpeed reduces gradients itself and shows none; set parallel.engine to torch, or leave "
                "train.layer_statistics out"
            )
        if is_object_reference(workload.model):
            problems.append("own models are run by the torch engine; set parallel.engine to torch")
        if workload.adapter and workload.adapter.quantize != "none":
            problems.append("DeepSpeed has no weights in 4 bits; set parallel.engine to torch")
        if verifies:
            problems.append(
                "DeepSpeed sums gradients itself, so that no other rank can compare them; set parallel.engine to "
                "torch, or leave resources.verify out"
            )
        if prunes or workload.head_penalty:
            key = "prune" if prunes else "workload.head_penalty"
            problems.append(
                f"{key} changes gradients before their norm, which DeepSpeed computes itself; set parallel.engine to "
                "torch"
            )
    problems += _with_compared_texts(workload.objective, layout)
    return [*problems, *_with_equal_bits(train, layout)] if train.determinism == "bitwise" else problems


def _with_equal_bits(train: TrainSpec, layout: Layout) -> list[str]:
    """Return the options under which bits depend on the width."""
    cut = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    result = [
        f"determinism bitwise holds for any data-parallel width, and {axis} {getattr(layout, axis)} changes the "
        f"order of sums; set {axis} to 1"
        for axis in cut
    ]
    if layout.zero:
        result.append("determinism bitwise sums gradients in a fixed tree; set zero to 0")
    shard_size = train.global_batch // train.virtual_shards
    if layout.micro_batch != shard_size or train.virtual_shards % layout.dp:
        result.append(
            f"determinism bitwise computes each of {train.virtual_shards} virtual shards alone; leave micro_batch "
            f"out or set it to {shard_size}, on a number of workers that divides {train.virtual_shards}"
        )
    return result


def _with_compared_texts(objective: str, layout: Layout) -> list[str]:
    """Return the axes over which the texts of a global batch cannot be compared, if the objective compares them."""
    if objective != "sentence_embeddings":
        return []
    result = [
        f"sentence_embeddings compares whole texts of the global batch, which {axis} {getattr(layout, axis)} cuts; set "
        f"{axis} to 1"
        for axis in ("pp", "cp")
        if getattr(layout, axis) > 1
    ]
    if layout.engine == "deepspeed":
        result.append("only the torch engine trains sentence_embeddings; set parallel.engine to torch")
    return result


def _with_sequence_warmup(train: TrainSpec, layout: Layout) -> list[str]:
    """Return the options that fix the shape of rows, and so exclude sequence warm-up."""
    result = [
        f"train.sequence_warmup changes the length of rows, which {axis} {getattr(layout, axis)} fixes; set {axis} to 1"
        for axis in ("pp", "cp")
        if getattr(layout, axis) > 1
    ]
    if layout.engine == "deepspeed":
        result.append(
            "train.sequence_warmup changes the rows of a micro-batch, which DeepSpeed fixes; set parallel.engine "
            "to torch"
        )
    if train.compile:
        result.append(
            "train.sequence_warmup would compile every block again for each length; set train.compile to false"
        )
    if layout.sequence and train.sequence_warmup and train.sequence_warmup.length % layout.tp:
        result.append(
            f"train.sequence_warmup.length must be a multiple of tp {layout.tp}, because sequence parallelism divides "
            "it; raise it, or set parallel.sequence to false"
        )
    return result


def _by_deepspeed(train: TrainSpec, layout: Layout) -> list[str]:
    """Return the features that the DeepSpeed engine does not support, or computes differently from the torch engine."""
    result = []
    if train.optimizer.name != "adamw":
        result.append(
            f"the DeepSpeed engine runs adamw, but the optimizer is {train.optimizer.name}; "
            "set train.optimizer.name to adamw, or parallel.engine to torch"
        )
    if train.determinism == "bitwise":
        result.append(
            "determinism bitwise adds gradients in an order that DeepSpeed does not; "
            "set train.determinism to rerun, or parallel.engine to torch"
        )
    if train.thaw:
        result.append(
            "DeepSpeed keeps one step count for all parameters, but train.thaw needs its own for thawed ones; set "
            "parallel.engine to torch"
        )
    if train.reference == "held":
        result.append(
            "DeepSpeed cannot swap its weights with those of a held reference; set train.reference to "
            "precomputed, or parallel.engine to torch"
        )
    if layout.zero == 3 and train.compile:
        result.append(
            "DeepSpeed's ZeRO 3 frees weights between layers, which compiled blocks keep; set train.compile to false"
        )
    if layout.recompute == "selective":
        # Observed: ZeRO 3 fails, because it fetches weights again; ZeRO 2 gives slightly different gradients.
        result.append(
            "selective recomputation is wrong together with DeepSpeed's hooks; set recompute to full or none"
        )
    return result
