import dataclasses
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from orchestrator.config import spec
from orchestrator.config.errors import InputError
from orchestrator.config.other_names import _KEYS, KEYS
from orchestrator.config.overrides import override
from orchestrator.config.validation_messages import _keys, _places

SECTIONS = "|".join(spec.JobSpec.model_fields)
HINTS = sorted({*KEYS.values()})


def document() -> dict[str, Any]:
    """A job in which all that hints name has what it needs."""
    return {
        "name": "a",
        "workload": {"model": "hf:base", "adapter": {"kind": "lora"}},
        "data": {
            "sources": [{"uri": "a.txt"}],
            "tokenizer": "base",
            "sequence_length": 64,
            "validation": {"share": 0.1},
        },
        "train": {"steps": 10, "global_batch": 4},
        "evaluate": {"every": 5},
        "parallel": {"zero": 0},
        "sinks": {},
    }


@pytest.mark.parametrize("hint", HINTS)
def test_the_keys_of_a_hint_are_there(hint: str) -> None:
    root: type[BaseModel] = spec.JobSpec
    for key in re.findall(rf"\b(?:{SECTIONS})(?:\.\w+)+", hint):
        *parents, last = key.split(".")
        assert last in ("jsonl", *_keys(root, parents)), key


@pytest.mark.parametrize("hint", HINTS)
def test_what_a_hint_writes_is_a_job(hint: str) -> None:
    """Hints such as `train.precision: bf16` and `checkpoint.average, as in {ema: 0.999}`."""
    for key, value in re.findall(r"((?:[a-z_]+\.)*[a-z_]+)(?:: |, as in )([\[{'].*[\]}']|[a-z0-9_]+$)", hint):
        given = document()
        if key.startswith(("rewards", "rollout")):
            given["workload"]["objective"] = "grpo"
            given["rewards"] = [{"kind": "exact_match"}]
            given["train"]["global_batch"] = 8
            given["data"]["sequence_length"] = 256
        if key.startswith("distill"):
            given["distill"] = {"teacher": "hf:large"}
        if key == "quantize":
            given["workload"]["adapter"] = None
        override(given, f"{key}={value}")
        spec.parse(given)


def unanswered(names: Iterable[str]) -> list[str]:
    """The names that an unknown key of a job file would get no place for, and no reason."""
    return [name for name in names if name not in KEYS and not _places(spec.JobSpec, name)]


def test_every_argument_of_the_trainer_has_a_place_or_a_reason() -> None:
    """Asked of the library itself, so that a new version's arguments are missed here and not by users."""
    from transformers import TrainingArguments

    assert unanswered(field.name for field in dataclasses.fields(TrainingArguments)) == []


@pytest.mark.slow
def test_so_has_every_argument_of_trl_and_accelerate() -> None:
    import trl
    from accelerate.commands.config.config_args import ClusterConfig

    for kind in (
        trl.SFTConfig,
        trl.DPOConfig,
        trl.KTOConfig,
        trl.RewardConfig,
        trl.GRPOConfig,
        trl.RLOOConfig,
        trl.ModelConfig,
    ):
        names = {field.name for field in dataclasses.fields(kind)} - {
            "beta"
        }  # an optimizer's betas are nearer
        assert unanswered(names) == [], kind
    of_tpus = {"command_file", "commands"}
    names = {field.name for field in dataclasses.fields(ClusterConfig)} - of_tpus
    assert unanswered(names) == []


def test_every_key_of_axolotl_has_a_place_or_a_reason() -> None:
    """Those of its AxolotlInputConfig of November 2026, without those of quantizing."""
    names = (Path(__file__).parents[3] / "fixtures/axolotl_keys.txt").read_text().split()
    assert len(names) > 350
    assert unanswered(names) == []


@pytest.mark.slow
def test_so_has_every_argument_of_peft_and_of_a_download() -> None:
    import huggingface_hub
    import peft

    assert unanswered(field.name for field in dataclasses.fields(peft.LoraConfig)) == []
    of_the_client = {"library_name", "library_version", "user_agent", "etag_timeout", "headers", "tqdm_class"}
    of_the_client |= {"token", "dry_run", "max_workers"}
    names = inspect.signature(huggingface_hub.snapshot_download).parameters.keys() - of_the_client
    assert unanswered(names) == []


@pytest.mark.slow
def test_every_argument_of_wandb_has_an_answer_where_it_would_stand() -> None:
    import wandb

    given = document()
    for name in inspect.signature(wandb.init).parameters.keys() - {"project", "entity", "mode"}:
        given["sinks"] = {"wandb": {"project": "p", name: 1}}
        with pytest.raises(InputError, match="W&B gets the whole job as its configuration"):
            spec.parse(given)


def test_no_name_has_two_answers() -> None:
    names = [name for names in _KEYS.values() for name in names.split()]
    assert len(names) == len(set(names))
    assert all(len(name) > 1 or name == "r" for name in names), "a name was taken apart"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.optimizer.min_lr", "train.optimizer.final_lr is min_lr divided by lr"),
        ("train.optimizer.no_decay", "biases and norms (vectors) never have weight decay"),
        ("gradient_clipping", "train.optimizer.clip"),
        ("workload.adapter.r", "workload.adapter.rank"),
        ("workload.lora", "workload.adapter, as in {kind: lora, rank: 16}"),
        ("train.resume_from", "run the same command again to resume from the last commit"),
        ("train.optimizer.beta", "did you mean 'betas'?"),
        ("train.num_iterations", "rollout.epochs"),
        ("rollout.vllm_server_port", "not here, because rollout.engine: vllm has no settings of its own"),
        ("train.push_to_hub", "checkpoint.push, as in USER/NAME"),
        ("sinks.wandb.tags", "not here, because W&B gets the whole job"),
        ("wandb_entity", "sinks.wandb.entity"),
        ("sinks.wandb.save_code", "not here, because W&B gets the whole job"),
        ("sinks.wandb.projekt", "did you mean 'project'?"),
        ("workload.adapter.loraplus_lr_ratio", "train.optimizer.groups sets another learning rate"),
        ("train.num_processes", "resources.workers is the number of ranks"),
        ("base_model", "workload.model"),
        ("data.train_on_inputs", "objective conversation predicts answers only"),
        ("workload.attn_implementation", "not here, because kernels follow from the device"),
        ("train.micro_batch", "did you mean parallel.micro_batch?"),
        ("train.weight_decay", "did you mean train.optimizer.weight_decay?"),
        ("train.seed", "did you mean seed?"),
        ("train.every", "did you mean train.layer_statistics.every or evaluate.every or checkpoint.every"),
        ("train.optimizer.final_lrs", "did you mean 'final_lr'?"),
        ("train.patience", "did you mean stop_when.patience?"),
        ("data.weight", "did you mean data.sources.0.weight or "),
    ],
)
def test_an_unknown_key_has_a_hint_to_the_right_one(key: str, hint: str) -> None:
    given = document()
    override(given, f"{key}=4")
    with pytest.raises(InputError) as told:
        spec.parse(given)
    assert str(told.value.each()[0]).split("; ", 1)[1].removeprefix("it is ").startswith(hint)
