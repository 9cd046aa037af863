"""Fill in a job from verl's keys (https://verl.readthedocs.io), of its file or of its command line."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.launch.foreign_jobs.common import (
    fill_rollout,
    fill_updates,
    full_rollouts,
    name_of,
    option,
    set_options,
    updates_of,
)
from orchestrator.launch.foreign_jobs.job import ForeignJob


def verl(job: ForeignJob) -> None:
    """Fill in a job from verl's keys (https://verl.readthedocs.io), of its file or of its command line."""
    arguments = job.arguments
    model = arguments.take(
        "actor_rollout_ref.model.path",
        "model.partial_pretrain",
        "model.path",
        "actor_rollout_ref.model.hf_config_path",
    )
    job.model(model)
    updates = 1  # optimizer steps to one of verl's steps
    if "actor_rollout_ref" in arguments:
        _verl_rollouts(job)
        updates = updates_of(job)
    else:
        _verl_sft(job)
    if (every := arguments.number("trainer.save_freq")) and every > 0:
        job.part("checkpoint")["every"] = int(every) * updates
    every = arguments.number("trainer.test_freq")
    if every and every > 0 and "validation" in job.part("data"):
        job.document["evaluate"] = {"every": int(every) * updates}
    if updates > 1:
        full_rollouts(job)
    name = arguments.take("trainer.experiment_name")
    arguments.drop(
        "trainer.project_name trainer.logger trainer.default_local_dir data.val_files "
        "data.truncation data.filter_overlong_prompts data.shuffle trainer.critic_warmup "
        "trainer.val_before_train trainer.resume_mode trainer.balance_batch "
        "data.return_raw_chat data.return_raw_input_ids"
    )
    if isinstance(name, str) and not name.startswith("$"):
        job.document["name"] = name_of(name)


def _verl_rollouts(job: ForeignJob) -> None:
    arguments = job.arguments
    estimator = str(arguments.take("algorithm.adv_estimator", default="gae"))
    objective = (
        "reinforce"
        if estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "opo", "remax")
        else "grpo"
    )
    if estimator != "grpo":
        job.lines.append(
            f"workload.objective: {objective}, the closest here to algorithm.adv_estimator {estimator}"
        )
    files = arguments.take("data.train_files")
    paths = [files] if isinstance(files, str) else list(files or ())
    paths = [str(path).strip("[]'\" ") for path in paths]
    columns = {
        "prompt": str(arguments.take("data.prompt_key", default="prompt")),
        "answer": "reward_model.ground_truth",
    }
    if not paths:
        raise InputError("names no data", "--from", "add data.train_files")
    sources: list[tuple[str, Any, float]] = [
        (job.source(path, files=_home(path)), columns, 1.0) for path in paths
    ]
    job.sources(objective, sources)
    group = int(arguments.number("actor_rollout_ref.rollout.n", default=1))
    if group < 2:
        group = 4
        job.lines.append(
            "rollout.group: 4; answers to a prompt are compared with each other, so one is not enough"
        )
    prompt = arguments.number("data.max_prompt_length", default=512)
    answer = arguments.number("data.max_response_length", default=512)
    temperature = arguments.number("actor_rollout_ref.rollout.temperature", default=1.0)
    fill_rollout(job, group=group, answer=answer, prompt=prompt, temperature=temperature, rewards=())
    prompts = int(arguments.number("data.train_batch_size", "data.gen_batch_size", default=256))
    small = int(arguments.number("actor_rollout_ref.actor.ppo_mini_batch_size", default=prompts))
    if not 0 < small <= prompts or prompts % small:
        job.lines.append(
            f"rollout.steps: 1 optimizer step uses all {prompts} prompts; ppo_mini_batch_size {small} does not "
            "divide them"
        )
        small = prompts
    fill_updates(job, prompts // small, arguments.number("actor_rollout_ref.actor.ppo_epochs", default=1))
    job.part("train")["global_batch"] = small * group
    job.lines.append(f"train.global_batch: {small * group} = {small} prompts x {group} answers")
    _verl_steps(job, 30, updates_of(job))
    lr = arguments.number("actor_rollout_ref.actor.optim.lr")
    if lr is None:
        lr = job.default("train.optimizer.lr", 1e-6, "verl")
    _verl_optimizer(job, "actor_rollout_ref.actor.optim", lr, "constant", "actor_rollout_ref.actor.grad_clip")
    uses = arguments.flag("actor_rollout_ref.actor.use_kl_loss")
    weight = arguments.number("actor_rollout_ref.actor.kl_loss_coef", default=0.001)
    if objective == "grpo":
        set_options(job, {"beta": float(weight) if uses else None} | _verl_loss(job))
    job.part("train")["precision"] = "bf16"
    _verl_model(job, "actor_rollout_ref.model")
    arguments.drop(
        "actor_rollout_ref.model.use_remove_padding "
        "algorithm.use_kl_in_reward actor_rollout_ref.actor.use_dynamic_bsz "
        "trainer.nnodes"
    )


def _verl_loss(job: ForeignJob) -> dict[str, Any]:
    """Return the options of the loss of grpo, by verl's values where they are not this project's."""
    arguments, actor = job.arguments, "actor_rollout_ref.actor"
    modes = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
    estimates = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    mode = arguments.take(f"{actor}.loss_agg_mode", default="token-mean")
    estimate = option(job, "kl_loss_type", arguments.take(f"{actor}.kl_loss_type", default="k3"), estimates)
    scales = str(arguments.take("algorithm.norm_adv_by_std_in_grpo", default=True)).lower() != "false"
    return {
        "loss_type": option(job, "loss_agg_mode", mode, modes),
        "kl": None if estimate == "k3" else estimate,
        "epsilon": arguments.number(f"{actor}.clip_ratio_low", f"{actor}.clip_ratio"),
        "epsilon_high": arguments.number(f"{actor}.clip_ratio_high"),
        "delta": arguments.number(f"{actor}.clip_ratio_c", default=3.0),
        "scale_rewards": None if scales else "none",
    }


def _verl_optimizer(job: ForeignJob, prefix: str, lr: float | None, schedule: str, clip: str) -> None:
    """Set AdamW from a section of keys, with verl's usual values. `clip` is the key of the largest norm."""
    arguments = job.arguments
    job.optimizer("adamw", lr, schedule, None)
    warmup = arguments.number(f"{prefix}.lr_warmup_steps")
    updates = updates_of(job) if "rollout" in job.document else 1
    job.warmup(
        warmup and warmup * updates,
        arguments.number(f"{prefix}.lr_warmup_steps_ratio", f"{prefix}.warmup_steps_ratio"),
    )
    optimizer = job.part("train")["optimizer"]
    optimizer["weight_decay"] = float(arguments.number(f"{prefix}.weight_decay", default=0.01))
    optimizer["clip"] = float(arguments.number(clip, default=1.0))


def _verl_steps(job: ForeignJob, default: float, updates: int = 1) -> None:
    """Set the steps; without any, and without epochs, by the usual epochs (verl/trainer/config).

    A step of verl has several `updates` here.
    """
    max_steps, epochs = (
        job.arguments.number("trainer.total_training_steps"),
        job.arguments.number("trainer.total_epochs"),
    )
    if epochs is None and not (max_steps and max_steps > 0):
        epochs = job.default("epochs", default, "verl")
    job.steps(max_steps and max_steps * updates, epochs)


def _verl_sft(job: ForeignJob) -> None:
    arguments = job.arguments
    files = str(arguments.take("data.train_files", default="") or "")
    if not files:
        raise InputError("names no data", "--from", "add data.train_files")
    prompt, answer = arguments.take("data.prompt_key"), arguments.take("data.response_key")
    inner = [
        str(arguments.take(f"data.{side}_dict_keys", default="")).strip("[]'\"")
        for side in ("prompt", "response")
    ]
    columns: Any = None
    if prompt and answer:
        names = [
            f"{key}.{below}" if below else str(key)
            for key, below in zip((prompt, answer), inner, strict=True)
        ]
        columns = {"prompt": names[0], "completion": names[1]}
    elif messages := arguments.take("data.messages_key", "data.multiturn.messages_key"):
        columns = {"messages": str(messages)}
    job.sources("conversation", [(job.source(files, files=_home(files)), columns, 1.0)])
    set_options(job, {"pack": "no"})  # a sample of verl is a row
    job.chat_template(None)
    job.length(arguments.number("data.max_length", default=1024))
    job.part("train")["global_batch"] = int(arguments.number("data.train_batch_size", default=256))
    arguments.drop(
        "data.micro_batch_size data.multiturn.enable data.pad_mode data.use_dynamic_bsz "
        "engine.ulysses_sequence_parallel_size ulysses_sequence_parallel_size "
        "use_remove_padding"
    )
    if micro := arguments.number("data.micro_batch_size_per_gpu", "data.micro_batch_size"):
        job.part("parallel")["micro_batch"] = int(micro)
    _verl_steps(job, 4)
    schedule = arguments.take("optim.lr_scheduler", default="cosine")
    _verl_optimizer(job, "optim", arguments.number("optim.lr"), schedule, "optim.clip_grad")
    job.part("train")["precision"] = "bf16"
    _verl_model(job, "model")


def _verl_model(job: ForeignJob, prefix: str) -> None:
    """Set recomputation and the adapter from a section of keys."""
    arguments = job.arguments
    if arguments.flag(f"{prefix}.enable_gradient_checkpointing"):
        job.part("parallel")["recompute"] = "full"
    if (rank := arguments.number(f"{prefix}.lora_rank")) and rank > 0:
        targets = arguments.take(f"{prefix}.target_modules", default="all-linear")
        job.adapter(rank, arguments.number(f"{prefix}.lora_alpha"), targets=targets, nf4=False)


def _home(path: str) -> str:
    """Return a path below the home folder as one below data/, where a job finds it."""
    return re.sub(r"^(\$HOME|~)/(data/)?", "data/", path)
