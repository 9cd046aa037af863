"""Fill in a job from the arguments of TRL, of Hugging Face's Trainer and of its example scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.records import REWARDED
from orchestrator.evaluate.config import metrics_of
from orchestrator.launch.foreign_jobs.common import (
    HERE_ANYWAY,
    TrainerDefaults,
    fill_rollout_of_trl,
    fill_training,
    full_groups,
    full_rollouts,
    set_options,
)
from orchestrator.launch.foreign_jobs.job import ForeignJob
from orchestrator.launch.foreign_jobs.read import SCRIPT, Arguments


def hf_trainer(job: ForeignJob) -> None:
    """Fill in a job from the arguments of TRL and of Hugging Face's Trainer and its example scripts."""
    arguments = job.arguments
    named = arguments.take("model_name_or_path", "model_name", "model", "config_name")
    job.model(named)
    arguments.drop("tokenizer_name", "tokenizer_name_or_path")
    guess = _trainer_objective(job)
    objective = job.asked or guess
    if objective in REWARDED:
        fill_rollout_of_trl(job, arguments, arguments.number("max_prompt_length", default=512), objective)
    _trainer_data(job, objective)
    job.chat_template(arguments.take("chat_template", "chat_template_path"))
    if objective not in REWARDED:
        job.length(
            arguments.number(
                "max_length",
                "max_seq_length",
                "block_size",
                "max_source_length",
                "model_max_length",
            )
        )
    if objective not in REWARDED and objective != "conversation":
        set_options(job, {"beta": arguments.number("beta", "dpo_beta")})
    packs = job.part("workload")["objective"] in ("conversation", "causal_lm")
    if objective == "conversation" and packs and not arguments.flag("packing"):
        set_options(job, {"pack": "no"})
    job.batch(
        arguments.number("per_device_train_batch_size", "per_gpu_train_batch_size", default=8),
        arguments.number("gradient_accumulation_steps", default=1),
        _devices(job),
    )
    if objective in REWARDED:
        full_groups(job)
    whose, lr = "Hugging Face's Trainer", 5e-5 if objective not in OF_TRL else None
    if objective in OF_TRL and (objective != "conversation" or _is_of_trl(job)):
        whose, lr = "TRL", OF_TRL[objective]
    fill_training(job, TrainerDefaults(whose, schedule="linear", epochs=3, lr=lr))
    targets = arguments.take("lora_target_modules")
    if arguments.flag("use_peft", "use_lora", "lora"):
        job.adapter(
            arguments.number("lora_r", "lora_rank"),
            arguments.number("lora_alpha"),
            targets=targets,
            nf4=arguments.flag("load_in_4bit"),
            dora=arguments.flag("use_dora"),
            scaled=arguments.flag("use_rslora"),
        )
    if objective in REWARDED:
        full_rollouts(job)
    _fill_evaluation(job, objective)
    arguments.drop(*HERE_ANYWAY)
    arguments.drop_defaults(TRAINER_DEFAULTS)


TRAINER_DEFAULTS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys((
        "average_tokens_across_devices", "log_on_each_node", "logging_nan_inf_filter", "eval_do_concat_batches",
        "dataloader_pin_memory", "dataloader_in_order", "skip_memory_metrics", "accelerator_config.even_batches",
        "accelerator_config.use_seedable_sampler", "disable_dropout", "ds3_gather_for_generation", "shuffle_dataset",
        "use_bias_correction_kl", "log_multimodal", "vllm_importance_sampling_correction", "save_safetensors",
    ), (True,)),
    **dict.fromkeys((
        "top_p", "repetition_penalty", "vllm_tensor_parallel_size",
        "sapo_temperature_pos", "top_entropy_quantile", "entropy_coef_max",
    ), (1,)),
    "include_num_input_tokens_seen": ("no",), "log_level_replica": ("warning",), "project": ("huggingface",),
    "per_device_eval_batch_size": (8,), "hub_strategy": ("every_save",), "train_sampling_strategy": ("random",),
    "length_column_name": ("length",), "ddp_timeout": (1800,), "local_rank": (-1, 0),
    "truncation_mode": ("keep_start",), "packing_strategy": ("bfd",),
    "loss_type": ("nll", "sigmoid", ["sigmoid"]), "f_divergence_type": ("reverse_kl",),
    "f_alpha_divergence_coef": (0.5,), "discopop_tau": (0.05,), "ref_model_mixup_alpha": (0.6,),
    "ref_model_sync_steps": (512,), "vllm_mode": ("colocate",), "vllm_model_impl": ("vllm",),
    "vllm_server_host": ("0.0.0.0",), "vllm_server_port": (8000,), "vllm_server_timeout": (240,),
    "vllm_group_port": (51216,), "vllm_gpu_memory_utilization": (0.3,),
    "vllm_importance_sampling_mode": ("sequence_mask",), "vllm_importance_sampling_clip_max": (3,), "epsilon": (0.2,),
    "sapo_temperature_neg": (1.05,), "vespo_k_pos": (2,), "vespo_lambda_pos": (3,), "vespo_k_neg": (3,),
    "vespo_lambda_neg": (2,), "importance_sampling_level": ("token",), "scale_rewards": ("group",),
    "multi_objective_aggregation": ("sum_then_normalize",), "entropy_coef_delta": (0.005,), "entropy_target": (0.2,),
}  # fmt: skip
"""Defaults of transformers' and TRL's arguments that are not empty, of keys without a place or with the same default
here. A key whose default is another one here, such as `loss_type` of GRPO, is missing."""


def _fill_evaluation(job: ForeignJob, objective: str) -> None:
    """Set held-out data and how often it is evaluated, if the arguments ask for evaluations."""
    arguments = job.arguments
    strategy = str(arguments.take("eval_strategy", "evaluation_strategy", default="no"))
    asks = arguments.flag("do_eval") or strategy not in ("no", "False")
    steps, every = job.part("train")["steps"], arguments.number("eval_steps")
    if strategy == "epoch":
        every = job.epoch_steps
    if asks and objective not in REWARDED and "validation" not in job.part("data"):
        job.part("data")["validation"] = {"share": 0.05}
        job.lines.append(
            "data.validation.share: 0.05 of the training data; name a split of its own with sources"
        )
    if asks and "validation" in job.part("data"):
        if not every:
            every = steps
        elif every < 1:  # a share of all steps
            every = max(1, every * steps)
        job.document["evaluate"] = {"every": int(min(every, steps))}
        _keep_best(job, objective)


def _keep_best(job: ForeignJob, objective: str) -> None:
    """Keep the checkpoint that is best by the metric of the arguments, if they ask for it."""
    arguments, evaluate, checkpoint = job.arguments, job.document["evaluate"], job.part("checkpoint")
    metric = str(arguments.take("metric_for_best_model", default="loss")).removeprefix("eval_")
    if not arguments.flag("load_best_model_at_end"):
        return
    arguments.drop("greater_is_better")  # each metric has its direction
    if metric not in (known := metrics_of(objective)):
        job.lines.append(f"checkpoint.keep_best: validation.loss; {metric} is not one of {', '.join(known)}")
        metric = "loss"
    if metric != "loss":
        evaluate["metrics"] = ["loss", metric]
    checkpoint["keep_best"] = f"validation.{metric}"
    if checkpoint["every"] % evaluate["every"]:
        checkpoint["every"] = evaluate["every"]
        job.lines.append(
            f"checkpoint.every: {evaluate['every']}, as evaluate.every, for checkpoint.keep_best"
        )


def _is_of_trl(job: ForeignJob) -> bool:
    """Return whether arguments for conversations are those of TRL, and not of someone's own script."""
    names = (str(job.arguments.take(name, default="")).lower() for name in (SCRIPT, "output_dir"))
    keys_of_trl = ("packing", "dataset_text_field", "completion_only_loss", "assistant_only_loss")
    return any(re.search(r"(?<![a-z])sft(?![a-z])", name) for name in names) or any(
        key in job.arguments for key in keys_of_trl
    )


def _devices(job: ForeignJob) -> float:
    """Return the processes that the launcher starts: accelerate's of all nodes, or torchrun's of each node."""
    arguments = job.arguments
    processes = arguments.number("nproc_per_node", "num_gpus", default=1) * arguments.number(
        "nnodes", "num_nodes", default=1
    )
    return float(arguments.number("num_processes", default=processes))


OF_TRL: Mapping[str, float] = {
    "conversation": 2e-5, "dpo": 1e-6, "ipo": 1e-6, "kto": 1e-6, "orpo": 1e-6, "grpo": 1e-6,
    "reinforce": 1e-6, "reward": 1e-4,
}  # fmt: skip
"""TRL's default learning rate by objective (trl/trainer/*_config.py); that of the Trainer is 5e-5."""
SCRIPTS: Mapping[str, str] = {
    "glue": "sequence_classification", "classification": "sequence_classification", "ner": "token_classification",
    "clm": "causal_lm", "mlm": "masked_lm", "plm": "permuted_lm", "translation": "seq2seq", "summarization": "seq2seq",
    "sft": "conversation", "grpo": "grpo", "orpo": "orpo", "kto": "kto", "ipo": "ipo", "reward": "reward", "dpo": "dpo",
}  # fmt: skip
"""Objectives by what is in the name of a script, or of the folder of a run."""
KEYS_OF: Mapping[str, tuple[str, ...]] = {
    "sequence_classification": ("task_name", "label_column_name"),
    "grpo": ("reward_funcs", "num_generations"),
    "kto": ("desirable_weight",),
    "dpo": ("precompute_ref_log_probs", "dpo_beta"),
    "masked_lm": ("mlm_probability",),
    "causal_lm": ("block_size", "config_overrides"),
    "seq2seq": ("source_lang", "max_target_length", "summary_column"),
}
"""Keys that only the arguments for an objective have."""


def _trainer_objective(job: ForeignJob) -> str:
    """Return the objective of a trainer's arguments, by its script, by its own keys, or by the name of the run."""
    arguments = job.arguments
    by_keys = (name for name, keys in KEYS_OF.items() if any(key in arguments for key in keys))
    result = (
        _named(arguments, str(arguments.take(SCRIPT, default="")))
        or next(by_keys, None)
        or _named(arguments, str(arguments.take("output_dir", default="")))
    )
    return result or ("dpo" if "beta" in arguments else "conversation")


def _named(arguments: Arguments, name: str) -> str | None:
    """Return the objective that the name of a script or of a folder contains; None without one."""
    for word, objective in SCRIPTS.items():
        if re.search(rf"(?<![a-z]){word}(?![a-z])", name.lower()):
            return "ipo" if objective == "dpo" and arguments.take("loss_type") == "ipo" else objective
    return None


def _trainer_data(job: ForeignJob, objective: str) -> None:
    """Set data and objective from a name, a mixture or files."""
    arguments = job.arguments
    split = str(arguments.take("dataset_train_split", "train_split", default="train"))
    config = arguments.take("dataset_config", "dataset_config_name")
    arguments.drop("dataset_test_split", "test_split")
    splits = arguments.take("dataset_splits")
    if isinstance(splits, list):
        split = next((str(split_name) for split_name in splits if "test" not in str(split_name)), split)
    label_column = arguments.take("label_column_name")
    job.label_column = str(label_column) if label_column is not None else None
    field: Any = arguments.take("dataset_text_field", "text_column_name", "text_column_names", "text_column")
    arguments.drop("dataset_kwargs.skip_prepare_dataset", "dataset_kwargs.add_special_tokens")
    named = arguments.take("dataset_name", "dataset", "task_name", "dataset_id_or_path")
    files = arguments.take("train_file", "train_data", "data_path")
    mixture = arguments.take("dataset_mixture.datasets") or arguments.group("dataset_mixture").take(
        "datasets"
    )
    mixer = arguments.group("dataset_mixer")
    arguments.drop("dataset_mixture.test_split_size dataset_mixture.seed dataset_configs")
    held_out = arguments.take("validation_file", "eval_file")
    columns = str(field) if objective in ("causal_lm", "masked_lm") and isinstance(field, str) else None
    sources: list[tuple[str, Any, float]] = []
    if mixture:
        for part in mixture:
            uri = job.source(part["id"], str(part.get("split", split)), part.get("config"))
            sources.append((uri, columns, float(part.get("weight") or 1.0)))
    elif any(True for _ in mixer.unused()):
        sources = [
            (job.source(name, split), columns, float(mixer.number(name, default=1.0)))
            for name, _ in list(mixer.unused())
        ]
    elif files or named:
        sources = [(job.source(named or files, split, config, files=files), columns, 1.0)]
    else:
        raise InputError("names no data", "--from", "add dataset_name or train_file")
    if objective == "conversation" and job.asked is None:
        objective_of_rows = _objective_of_files(sources)
        names_text = isinstance(field, str) and field not in ("messages", "conversations")
        # Saved arguments of TRL name the column text, whatever the rows hold.
        if names_text and objective_of_rows != "conversation":
            objective, sources = "causal_lm", [(uri, field, weight) for uri, _, weight in sources]
        elif objective_of_rows == "":
            objective = _plain_text_objective(job, [uri for uri, _, _ in sources])
    job.sources(objective, sources)
    if held_out:
        job.held_out(str(held_out))


def _plain_text_objective(job: ForeignJob, uris: list[str]) -> str:
    """Return what a model learns from rows of text: an encoder predicts labels if there are any, else hidden words."""
    if not job.is_encoder:
        return "causal_lm"
    return "sequence_classification" if any(job.labelled(uri) for uri in uris) else "masked_lm"


def _objective_of_files(sources: list[tuple[str, Any, float]]) -> str | None:
    """Return the objective that the rows which are here fit; None if none are here."""
    from glob import glob

    from orchestrator.launch.first_rows import rows_at

    for uri, _, _ in sources:
        if glob(uri) and (rows := rows_at(uri)) is not None:
            return rows.objective
    return None
