"""Translate the keys that axolotl, TRL and Hugging Face's Trainer share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.launch.first_job import legal_name
from orchestrator.launch.foreign_jobs.job import ForeignJob
from orchestrator.launch.foreign_jobs.read import Arguments

HERE_ANYWAY = (
    "dataset_prepared_path", "flash_attention", "attn_implementation", "strict", "group_by_length", "output_dir",
    "logging_steps", "log_level", "bf16", "fp16", "tf32", "torch_dtype", "dtype", "do_train", "overwrite_output_dir",
    "eval_sample_packing", "pad_to_sequence_len", "train_on_inputs", "is_llama_derived_model", "model_type",
    "tokenizer_type", "gradient_checkpointing_kwargs.use_reentrant", "dataset_num_proc", "preprocessing_num_workers",
    "use_flash_attention_2", "flash_attn", "logging_strategy", "logging_first_step", "save_strategy", "eval_strategy",
    "evaluation_strategy", "remove_unused_columns", "overwrite_cache", "plugins", "model_code_revision", "log_freq",
    "shuffle_train_dataset",
)  # fmt: skip
"""Keys to ignore: this project has their effect anyway, or derives it from other keys."""


@dataclass(frozen=True)
class TrainerDefaults:
    """The defaults of a trainer, for keys that its configuration leaves out.

    Attributes:
        whose: the trainer's name.
        schedule: the schedule of the learning rate.
        epochs: passes over the data.
        lr: the learning rate; None if it has no default.
    """

    whose: str
    schedule: str
    epochs: float
    lr: float | None = None


def fill_training(job: ForeignJob, defaults: TrainerDefaults) -> None:
    """Translate the keys that axolotl, TRL and the Trainer share: length, optimizer, precision, seed, parallelism,
    checkpoints, name. `defaults` holds the trainer's defaults."""
    arguments = job.arguments
    optimizer = job.part("train")["optimizer"]
    min_ratio = arguments.number("lr_scheduler_kwargs.min_lr_rate", "cosine_min_lr_ratio")
    max_steps, epochs = arguments.number("max_steps"), arguments.number("num_train_epochs", "num_epochs")
    if epochs is None and not (max_steps and max_steps > 0):
        epochs = job.default("epochs", defaults.epochs, defaults.whose)
    job.steps(max_steps, epochs)
    lr = arguments.number("learning_rate")
    if lr is None and defaults.lr is not None:
        lr = job.default("train.optimizer.lr", defaults.lr, defaults.whose)
    job.optimizer(
        arguments.take("optimizer", "optim"),
        lr,
        arguments.take("lr_scheduler_type", "lr_scheduler"),
        min_ratio,
        default=defaults.schedule,
    )
    job.warmup(arguments.number("warmup_steps"), arguments.number("warmup_ratio"))
    optimizer["weight_decay"] = float(arguments.number("weight_decay", default=0.0))
    optimizer["betas"] = [
        float(arguments.number("adam_beta1", default=0.9)), float(arguments.number("adam_beta2", default=0.999))
    ]  # fmt: skip
    if eps := arguments.number("adam_epsilon"):
        optimizer["eps"] = float(eps)
    clip = arguments.number("max_grad_norm", default=1.0)
    optimizer["clip"] = float(clip) if clip else None
    if optimizer["name"] != "adamw":
        optimizer.pop("betas")
    _precision(job)
    if (seed := arguments.number("seed")) is not None:
        job.document["seed"] = int(seed)
    _parallel(job)
    if every := arguments.number("save_steps"):
        job.part("checkpoint")["every"] = max(
            1, int(every if every >= 1 else every * job.part("train")["steps"])
        )
    if keep := arguments.number("save_total_limit"):
        job.part("checkpoint")["keep"] = int(keep)
    for key in ("run_name", "output_dir", "hub_model_id"):
        if isinstance(name := arguments.take(key), str) and not name.startswith("$"):
            job.document["name"] = name_of(name)
            break


def _precision(job: ForeignJob) -> None:
    arguments = job.arguments
    dtype = str(arguments.take("torch_dtype", "dtype", default="")).rsplit(".", 1)[-1]
    if arguments.flag("bf16", "bfloat16") or dtype == "bfloat16":
        job.part("train")["precision"] = "bf16"
    elif arguments.flag("fp16", "float16") or dtype == "float16":
        job.part("train")["precision"] = "bf16"
        job.lines.append("train.precision: bf16, which needs no loss scaling; fp16 was asked for")


def _parallel(job: ForeignJob) -> None:
    arguments, layout = job.arguments, job.part("parallel")
    deepspeed, fsdp = str(arguments.take("deepspeed", default="") or ""), arguments.take("fsdp")
    arguments.group("deepspeed")
    arguments.group("fsdp_config")
    arguments.drop("fsdp_version", "fsdp_final_state_dict_type")
    if stage := re.search(r"(?:zero|stage|ds_z)[_-]?([123])", deepspeed.lower()):
        layout["zero"] = int(stage[1])
    elif fsdp not in (None, "", [], False):
        layout["zero"] = 3
    elif deepspeed:
        job.lines.append(f"parallel.zero: chosen by the planner; the stage is in {deepspeed}")
    if arguments.flag("gradient_checkpointing", "activation_checkpointing"):
        layout["recompute"] = "full"
    for ours, names in (
        ("tp", ("tensor_parallel_size", "tp_size")),
        ("cp", ("context_parallel_size", "cp_size")),
    ):
        if (degree := arguments.number(*names)) and degree > 1:
            layout[ours] = int(degree)


def set_options(job: ForeignJob, options: Mapping[str, Any]) -> None:
    """Set options of the objective, those that have a value."""
    with_value = {name: value for name, value in options.items() if value is not None}
    if with_value:
        job.part("workload").setdefault("options", {}).update(with_value)


def fill_rollout(
    job: ForeignJob, group: float, answer: float, prompt: float, temperature: float, rewards: Any
) -> None:
    """Set the keys of learning from rewards."""
    job.document["rollout"] = {
        "group": int(group),
        "max_tokens": int(answer),
        "temperature": float(temperature),
    }
    job.length(int(prompt) + int(answer))
    functions = [rewards] if isinstance(rewards, str) else list(rewards)
    function_names = [name for name in functions if re.fullmatch(r"[A-Za-z_][\w.]*\.\w+", str(name))]
    made = [
        {"own": "{}:{}".format(*str(name).rsplit(".", 1))}
        for name in function_names
        if Path(f"{str(name).split('.')[0]}.py").exists()
    ]
    job.document["rewards"] = made or [{"kind": "math", "column": "answer"}]
    if not made:
        replaced = f", in place of {', '.join(map(str, functions))}" if functions else ""
        job.lines.append(
            f'rewards: kind math on the column "answer"{replaced}; docs/rewards.md lists other kinds'
        )


def option(job: ForeignJob, key: str, value: Any, names: Mapping[str, str]) -> str:
    """Return this project's name for the value of an option; the first of them, with a note, if it has none."""
    if (name := names.get(str(value).lower())) is not None:
        return name
    name = next(iter(names.values()))
    job.lines.append(f"workload.options: {key} {value} is not here; {name} in its place")
    return name


def fill_rollout_of_trl(job: ForeignJob, keys: Arguments, prompt: float, objective: str = "grpo") -> None:
    """Set the keys of learning from rewards from TRL's own.

    Args:
        job: the job to fill in.
        keys: TRL's keys.
        prompt: the most tokens of a prompt.
        objective: grpo or reinforce. Keys of the clipped ratio, which reinforce has not, stay unused then.
    """
    fill_rollout(
        job,
        group=keys.number("num_generations", default=8),
        answer=keys.number("max_completion_length", default=256),
        prompt=prompt,
        temperature=keys.number("temperature", default=1.0),
        rewards=keys.take("reward_funcs") or [],
    )
    scales = {"group": "group", "true": "group", "batch": "batch", "none": "none", "false": "none"}
    # dapo is TRL's default, and not that of this project.
    losses = {"dapo": "dapo", "grpo": "grpo", "dr_grpo": "dr_grpo"}
    scale = keys.take("scale_rewards")
    options = {
        "loss_type": option(job, "loss_type", keys.take("loss_type", default="dapo"), losses),
        "beta": keys.number("beta"),
        "scale_rewards": None if scale is None else option(job, "scale_rewards", scale, scales),
    }
    if objective == "grpo":
        options |= {
            "epsilon": keys.number("epsilon"),
            "epsilon_high": keys.number("epsilon_high"),
            "delta": keys.number("delta"),
            "importance_sampling_level": keys.take("importance_sampling_level"),
        }
    set_options(job, options)
    accumulation = job.arguments.number("gradient_accumulation_steps", default=1)
    generated = keys.number("steps_per_generation", default=accumulation)
    steps = max(1, round(generated / accumulation))
    if generated != steps * accumulation:
        job.lines.append(
            f"rollout.steps: {steps}; steps_per_generation {generated:g} is no multiple of gradient_accumulation_steps"
        )
    fill_updates(job, steps, keys.number("num_iterations", default=1))


def fill_updates(job: ForeignJob, steps: float, epochs: float) -> None:
    """Set how many steps divide a rollout between them, and how often they learn from it."""
    updates = {"steps": int(steps), "epochs": int(epochs)}
    job.document["rollout"] |= {key: value for key, value in updates.items() if value > 1}


def updates_of(job: ForeignJob) -> int:
    """Return the number of optimizer steps that learn from a rollout."""
    rollout = job.document["rollout"]
    return int(rollout.get("steps", 1) * rollout.get("epochs", 1))


def full_rollouts(job: ForeignJob) -> None:
    """Make the numbers of steps multiples of the steps of a rollout."""
    updates = updates_of(job)
    for name, key in (("train", "steps"), ("checkpoint", "every")):
        part = job.part(name)
        if part[key] % updates:
            part[key] = math.ceil(part[key] / updates) * updates
            job.lines.append(f"{name}.{key}: {part[key]}, whole rollouts of {updates} steps")


def full_groups(job: ForeignJob) -> None:
    """Make the global batch a multiple of the answers to a prompt."""
    train, group = job.part("train"), job.document["rollout"]["group"]
    if train["global_batch"] % group or train["global_batch"] < group:
        train["global_batch"] = max(1, round(train["global_batch"] / group)) * group
        job.lines.append(f"train.global_batch: {train['global_batch']}, whole groups of {group} answers")
    job.part("parallel").pop("micro_batch", None)


def name_of(text: str) -> str:
    """Return a legal name of a run, made from the last part of a path or of a name in another system."""
    return legal_name(text.rstrip("/").rsplit("/", 1)[-1])
