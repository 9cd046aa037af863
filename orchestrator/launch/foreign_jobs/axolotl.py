"""Fill in a job from axolotl's keys (https://docs.axolotl.ai/docs/config-reference.html)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.errors import InputError
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

PREFERENCES = {"dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "rm": "reward", "reward": "reward"}
"""Objectives by the value of `rl`."""
DEFAULTS = TrainerDefaults("axolotl", schedule="cosine", epochs=1)
"""A learning rate is required by axolotl."""
ALPACA = {"prompt": "{instruction}\n\n{input}", "completion": "output"}
COLUMNS: Mapping[str, dict[str, str]] = {
    "alpaca": ALPACA,
    "alpaca_chat": ALPACA,
    "gpteacher": {"prompt": "{instruction}\n\n{input}", "completion": "response"},
    "alpaca_w_system": {"prompt": "{system_prompt}\n\n{question}", "completion": "response"},
    "context_qa": {"prompt": "{context}\n\n{question}", "completion": "answer"},
    "alpaca_chat.load_qa": {"prompt": "question", "completion": "answer"},
    "alpaca_chat.load_concise": {"prompt": "{instruction}\n\n{input}", "completion": "output"},
    "summarizetldr": {"prompt": "article", "completion": "summary"},
    "explainchoice": {"prompt": "question", "completion": "explanation"},
    "oasst": {"prompt": "INSTRUCTION", "completion": "RESPONSE"},
    "sharegpt": {"messages": "conversations"},
}
"""The columns of axolotl's kinds of rows."""


def axolotl(job: ForeignJob) -> None:
    """Fill in a job from axolotl's keys (https://docs.axolotl.ai/docs/config-reference.html)."""
    arguments = job.arguments
    base = arguments.take("base_model")
    job.model(base)
    if (tokenizer := arguments.take("tokenizer_config")) not in (None, base):
        job.lines.append(f"data.tokenizer: the model's own; tokenizer_config {tokenizer} is ignored")
    rl = str(arguments.take("rl", default="")).lower()
    objective = PREFERENCES.get(rl, "conversation")
    if arguments.flag("reward_model"):
        objective = "reward"
    if rl == "grpo":
        _axolotl_grpo(job)
        return
    if rl and rl not in PREFERENCES:
        job.lines.append(f"workload.objective: dpo, the closest here to rl {rl}")
        objective = "dpo"
    _axolotl_data(job, objective)
    job.chat_template(arguments.take("chat_template"))
    job.length(arguments.number("sequence_len"))
    set_options(job, {"beta": arguments.number("rl_beta", "dpo_beta", "orpo_alpha")})
    _batch(job)
    fill_training(job, DEFAULTS)
    kind = str(arguments.take("adapter", default="")).lower()
    quantised = arguments.flag("load_in_4bit") or kind == "qlora"
    if kind in ("lora", "qlora", "dora") or arguments.flag("peft_use_dora"):
        targets = arguments.take("lora_target_modules")
        every = ["all-linear"] if arguments.flag("lora_target_linear") else []
        job.adapter(
            arguments.number("lora_r"),
            arguments.number("lora_alpha"),
            targets=targets if isinstance(targets, str) else [*(targets or ()), *every],
            nf4=quantised,
            dora=arguments.flag("peft_use_dora"),
            scaled=arguments.flag("peft_use_rslora"),
        )
    share = arguments.number("val_set_size")
    if share and 0 < share < 1:
        job.part("data")["validation"] = {"share": float(share)}
    elif share and job.rows:
        job.part("data")["validation"] = {"share": min(0.5, round(share / job.rows, 4))}
    _every(
        job,
        arguments.number("evals_per_epoch"),
        arguments.number("saves_per_epoch"),
        arguments.number("num_epochs", default=1),
    )
    arguments.drop("warmup_ratio", *HERE_ANYWAY)


def _batch(job: ForeignJob) -> None:
    arguments = job.arguments
    job.batch(
        arguments.number("micro_batch_size", default=1),
        arguments.number("gradient_accumulation_steps", default=1),
        arguments.number("num_processes", default=1),
    )


def _axolotl_data(job: ForeignJob, objective: str) -> None:
    """Set data and objective from `datasets` or `pretraining_dataset`."""
    arguments = job.arguments
    pretraining = arguments.take("pretraining_dataset")
    listed = pretraining or arguments.take("datasets") or []
    arguments.drop("test_datasets")
    datasets = [
        {"path": dataset} if isinstance(dataset, str) else dataset
        for dataset in ([listed] if isinstance(listed, str) else listed)
    ]
    if not datasets:
        raise InputError("names no data", "--from", "add datasets")
    sources = []
    for dataset in datasets:
        kind = dataset.get("type") or ("completion" if pretraining else "chat_template")
        columns = _axolotl_columns(dataset, kind, objective)
        if (
            isinstance(kind, str)
            and kind.startswith(("completion", "pretrain", "input_output"))
            and objective == "conversation"
        ):
            objective = "causal_lm"
        files = dataset.get("data_files")
        uri = job.source(
            dataset["path"],
            str(dataset.get("split", "train")),
            dataset.get("name"),
            files=files[0] if isinstance(files, list) else files,
        )
        sources.append((uri, columns, 1.0))
    if objective == "causal_lm":
        sources = [
            (uri, columns if isinstance(columns, str) else None, weight) for uri, columns, weight in sources
        ]
    job.sources(objective, sources)
    packed = arguments.flag("sample_packing")
    if objective == "conversation" and not packed:
        set_options(job, {"pack": "no"})


def _axolotl_columns(dataset: Mapping[str, Any], kind: Any, objective: str) -> Any:
    """Return the `field` of a source; None to find out."""
    if isinstance(kind, Mapping):
        question, answer = kind.get("field_instruction", "instruction"), kind.get("field_output", "output")
        more = kind.get("field_input")
        prompt = f"{{{question}}}\n\n{{{more}}}" if more else question
        if objective == "conversation":
            return {"prompt": prompt, "completion": answer}
        names = {"prompt": "field_prompt", "chosen": "field_chosen", "rejected": "field_rejected"}
        return {name: kind.get(key, name) for name, key in names.items()}
    if objective != "conversation":
        if any(key in dataset for key in ("field_messages", "field_chosen")):
            return {
                "prompt": dataset.get("field_messages", "messages"),
                "chosen": dataset.get("field_chosen", "chosen"),
                "rejected": dataset.get("field_rejected", "rejected"),
            }
        return None
    if kind.startswith(("completion", "pretrain")):
        return str(dataset.get("field") or dataset.get("text_column") or "text")
    if kind.startswith("chat_template") or "field_messages" in dataset:
        named = dataset.get("field_messages")
        return {"messages": str(named)} if named else None
    return COLUMNS.get(kind) or COLUMNS.get(kind.split(".")[0].split(":")[0])


def _axolotl_grpo(job: ForeignJob) -> None:
    arguments = job.arguments
    listed = arguments.take("datasets") or [{"path": "prompts.jsonl"}]
    job.sources(
        "grpo",
        [(job.source(dataset["path"], str(dataset.get("split", "train"))), None, 1.0) for dataset in listed],
    )
    of_trl = arguments.group("trl")
    fill_rollout_of_trl(job, of_trl, arguments.number("sequence_len", default=512))
    of_trl.drop("use_vllm")
    job.lines += [f"trl.{key}: not translated; {nearest}" for key, nearest in of_trl.unused()]
    _batch(job)
    full_groups(job)
    fill_training(job, DEFAULTS)
    full_rollouts(job)
    arguments.drop(*HERE_ANYWAY)


def _every(job: ForeignJob, evaluations: float | None, saves: float | None, epochs: float) -> None:
    """Set how often the job evaluates and saves, from axolotl's numbers of times an epoch."""
    arguments = job.arguments
    steps_per_epoch = job.part("train")["steps"] / max(epochs, 1e-9)
    steps = arguments.number("eval_steps")
    if "validation" in job.part("data"):
        every = (
            steps_per_epoch / evaluations
            if evaluations
            else steps * (steps_per_epoch if steps < 1 else 1)
            if steps
            else steps_per_epoch
        )
        job.document["evaluate"] = {"every": max(1, int(every))}
    if saves:
        job.part("checkpoint")["every"] = max(1, int(steps_per_epoch / saves))
