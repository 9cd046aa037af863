"""Fill in a job from torchtitan's TOML (https://github.com/pytorch/torchtitan)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.launch.foreign_jobs.job import ForeignJob


def torchtitan(job: ForeignJob) -> None:
    """Fill in a job from torchtitan's TOML (https://github.com/pytorch/torchtitan)."""
    arguments = job.arguments
    name, flavor = (
        str(arguments.take("model.name", default="llama3")).lower(),
        str(arguments.take("model.flavor", default="debugmodel")),
    )
    assets_path = arguments.take("model.hf_assets_path", "model.tokenizer_path", "job.tokenizer_path")
    arguments.drop("model.norm_type job.description job.dump_folder job.print_args model.tokenizer_path")
    preset, changes = _titan_model(name, flavor)
    job.part("workload").update(
        {"model": preset, "objective": "causal_lm", **({"changes": changes} if changes else {})}
    )
    tokenizer = str(assets_path or "tokenizer")
    job.part("data")["tokenizer"] = str(Path(tokenizer).parent) if tokenizer.endswith(".model") else tokenizer
    if preset.endswith("-tiny") and flavor != "debugmodel":
        job.lines.append(
            f"workload.model: {preset}; {name} {flavor} has no preset here, hf:<folder> names any model"
        )
    dataset = str(arguments.take("training.dataset", default="c4"))
    path = arguments.take("training.dataset_path")
    hub = {"c4": "allenai/c4", "c4_validation": "allenai/c4"}.get(dataset, dataset)
    job.sources(
        "causal_lm",
        [(job.source(hub, config="en" if hub == "allenai/c4" else None, files=path), "text", 1.0)],
    )
    job.part("data")["sequence_length"] = int(arguments.number("training.seq_len", default=2048))
    micro = arguments.number("training.local_batch_size", "training.batch_size", default=8)
    replicas = arguments.number(
        "parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree", default=1
    )
    shards = arguments.number(
        "parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", default=-1
    )
    total = arguments.number("training.global_batch_size", default=-1)
    if total and total > 0:
        job.part("train")["global_batch"] = int(total)
        job.part("parallel")["micro_batch"] = int(micro)
    else:
        job.batch(micro, 1, max(1, replicas) * max(1, shards))
    job.steps(arguments.number("training.steps", default=10000), None)
    min_ratio = arguments.number("lr_scheduler.min_lr_factor", default=0.0)
    kind = arguments.take("lr_scheduler.decay_type", default="linear")
    ratio = arguments.number("lr_scheduler.decay_ratio")
    lr = arguments.number("optimizer.lr")
    if lr is None:
        lr = job.default("train.optimizer.lr", 8e-4, "torchtitan")
    job.optimizer(
        arguments.take("optimizer.name"),
        lr,
        "warmup_stable_decay" if ratio else kind,
        min_ratio,
    )
    optimizer = job.part("train")["optimizer"]
    if ratio:
        optimizer["decay"] = f"{min(ratio * 100, 90):g}%"
        if kind not in ("linear", None):
            job.lines.append(f"train.optimizer.schedule: wsd, whose decay is linear; {kind} was asked for")
    warmup = arguments.number("lr_scheduler.warmup_steps", "training.warmup_steps", default=200)
    job.warmup(warmup, None)
    if ratio and isinstance(optimizer.get("warmup"), int):
        decay_steps = job.part("train")["steps"] - optimizer["warmup"]
        optimizer["decay"] = min(int(ratio * job.part("train")["steps"]), decay_steps)
    elif ratio:
        optimizer["decay"] = "80%"
    optimizer["weight_decay"] = float(arguments.number("optimizer.weight_decay", default=0.1))
    if eps := arguments.number("optimizer.eps"):
        optimizer["eps"] = float(eps)
    optimizer["clip"] = float(arguments.number("training.max_norm", default=1.0))
    job.part("train")["precision"] = "bf16"
    if "float8" in str(arguments.take("model.converters", default="")) or arguments.flag(
        "float8.enable_float8_linear"
    ):
        job.part("train")["precision"] = "fp8"
    if arguments.flag("compile.enable", "training.compile"):
        job.part("train")["compile"] = True
    _titan_layout(job, shards)
    _titan_rest(job)


def _titan_rest(job: ForeignJob) -> None:
    arguments = job.arguments
    if arguments.flag("checkpoint.enable", "checkpoint.enable_checkpoint"):
        job.part("checkpoint")["every"] = int(arguments.number("checkpoint.interval", default=500))
    if (seed := arguments.number("training.seed", "debug.seed")) is not None:
        job.document["seed"] = int(seed)
    if arguments.flag("validation.enable", "validation.enabled"):
        job.part("data")["validation"] = {"share": 0.01}
        job.document["evaluate"] = {"every": int(arguments.number("validation.freq", default=100))}
    arguments.drop(
        "metrics.log_freq optimizer.implementation optimizer.fused checkpoint.folder "
        "checkpoint.interval checkpoint.async_mode compile.components training.dtype "
        "training.mixed_precision_param training.mixed_precision_reduce "
        "activation_checkpoint.selective_ac_option "
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns "
        "profiling.profile_freq profiling.save_traces_folder "
        "profiling.save_memory_snapshot_folder profiling.trace_folder "
        "metrics.save_tb_folder checkpoint.export_dtype validation.steps "
        "validation.dataset validation.freq optimizer.beta1 optimizer.beta2 "
        "validation.local_batch_size validation.seq_len"
    )


def _titan_layout(job: ForeignJob, shards: float) -> None:
    arguments, layout = job.arguments, job.part("parallel")
    degrees = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree",
               "ep": "expert_parallel_degree"}  # fmt: skip
    for ours, theirs in degrees.items():
        degree = arguments.number(f"parallelism.{theirs}", f"experimental.{theirs}", f"training.{theirs}")
        if degree and degree > 1:
            layout[ours] = int(degree)
    if shards != 1:
        layout["zero"] = 2 if layout.get("pp") else 3
    schedules = {
        "1F1B": "1f1b",
        "Interleaved1F1B": "interleaved",
        "GPipe": "gpipe",
        "InterleavedZeroBubble": "zero_bubble",
        "ZBVZeroBubble": "zbv",
    }
    named = arguments.take(
        "parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule"
    )
    if layout.get("pp"):
        layout["schedule"] = schedules.get(str(named), "1f1b")
    mode = str(arguments.take("activation_checkpoint.mode", default="none"))
    if mode in ("selective", "full"):
        layout["recompute"] = mode


def _titan_model(name: str, flavor: str) -> tuple[str, dict[str, Any]]:
    """Return the preset of a model of torchtitan, and what of it changes."""
    presets: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
        ("llama3", "8B"): ("llama-3-8b", {}),
        ("llama3", "70B"): ("llama-3-70b", {}),
        ("llama3", "405B"): ("llama-3-70b", {"hidden": 16384, "layers": 126, "heads": 128, "intermediate": 53248}),
        ("llama3", "1B"): ("llama-3.2-1b", {}),
        ("qwen3", "0.6B"): ("qwen3-0.6b", {}),
        ("qwen3", "8B"): ("qwen3-8b", {}),
        ("qwen3", "30B-A3B"): ("qwen3-30b-a3b", {}),
        ("deepseek_v3", "671B"): ("deepseek-v3", {}),
        ("gpt_oss", "20B"): ("gpt-oss-20b", {}),
        ("gpt_oss", "120B"): ("gpt-oss-120b", {}),
    }  # fmt: skip
    tiny = {"qwen3": "qwen3-tiny", "qwen3_moe": "qwen3-tiny"}.get(name, "llama-tiny")
    return presets.get((name, flavor), (tiny, {}))
