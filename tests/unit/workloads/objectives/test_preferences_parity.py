"""Preferences here and in TRL's own trainers: twenty steps on the same batches from the same weights, and the losses of
every step within 1e-5."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl_models import KNOWN, LENGTH, SIZE, a_tokenizer, model_of

from workloads.load import load
from workloads.objectives.samples import Samples
from workloads.record_format import MARK, pack
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch

STEPS, ROWS, RECORDS = 20, 4, 40
BETA = 0.3


def answer(number: int, length: int) -> np.ndarray:
    return np.random.default_rng(number).integers(6, SIZE, length)


def prompt(number: int, length: int = 0) -> np.ndarray:
    return answer(1000 + number, length or 2 + number % 3)


def a_pair(number: int, first: int = 0, said: int = 0) -> np.ndarray:
    """A prompt of 2 to 4 tokens, a chosen answer of 3 to 7 and a rejected one of 2 to 9."""
    begin = prompt(number, first)
    sizes = (said or 3 + number % 5, 2 + number * 7 % 8)
    return pack([
        np.concatenate([begin, answer(which * 5000 + number, size) | MARK]) for which, size in enumerate(sizes)
    ])  # fmt: skip


def rows_of(record: np.ndarray) -> dict[str, Any]:
    """A record as TRL reads it."""
    count = int(record[0])
    sizes, rest = record[1 : 1 + count], record[1 + count :].astype(np.int64)
    chosen, rejected = rest[: sizes[0]], rest[sizes[0] :]
    begin = int((chosen & MARK == 0).sum())
    parts = {"prompt_ids": chosen[:begin], "chosen_ids": chosen[begin:], "rejected_ids": rejected[begin:]}
    return {name: (ids & ~MARK).tolist() for name, ids in parts.items()}


def judged(records: list[np.ndarray]) -> list[dict[str, Any]]:
    """The first answers of records, each with that of the next one, as TRL reads them."""
    rows = [rows_of(record) for record in records]
    return [
        {
            "prompt_ids": row["prompt_ids"], "completion_ids": row["chosen_ids"],
            "KL_completion_ids": rows[(number + 1) % len(rows)]["chosen_ids"], "label": number % 3 > 0,
        }
        for number, row in enumerate(rows)
    ]  # fmt: skip


def trainer_of(name: str, folder: Path, model: Any, records: list[np.ndarray], **options: Any) -> Any:
    import trl

    rows = [rows_of(record) for record in records]
    if name == "reward":
        rows = [
            {
                "chosen_ids": row["prompt_ids"] + row["chosen_ids"],
                "rejected_ids": row["prompt_ids"] + row["rejected_ids"],
            }
            for row in rows
        ]
        kinds = (trl.RewardConfig, trl.RewardTrainer)
    elif name == "kto":
        rows = judged(records)
        kinds = (trl.KTOConfig, trl.KTOTrainer)
    else:
        kinds = (trl.DPOConfig, trl.DPOTrainer)
    given = {"output_dir": str(folder / "trl"), "report_to": [], "use_cpu": True, "max_length": LENGTH // 2,
             "per_device_train_batch_size": ROWS, "bf16": False, "gradient_checkpointing": False,
             "disable_dropout": True, **options}  # fmt: skip

    class Trainer(kinds[1]):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # which is of tokens

    reference = {} if name == "reward" else {"ref_model": copy.deepcopy(model)}
    return Trainer(
        model=model, args=kinds[0](**given), train_dataset=Dataset.from_list(rows),
        processing_class=a_tokenizer(folder), **reference,
    )  # fmt: skip


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dpo": ("dpo", {"beta": BETA}, {"beta": BETA, "loss_type": ["sigmoid"]}),
    "dpo hinge": ("dpo", {"beta": BETA, "loss": "hinge"}, {"beta": BETA, "loss_type": ["hinge"]}),
    "dpo robust": (
        "dpo", {"beta": BETA, "loss": "robust", "label_smoothing": 0.2},
        {"beta": BETA, "loss_type": ["robust"], "label_smoothing": 0.2},
    ),
    "dpo, the beginning lost": (
        "dpo", {"beta": BETA, "truncate": "start"},
        {"beta": BETA, "loss_type": ["sigmoid"], "truncation_mode": "keep_end"},
    ),
    "dpo with sft": (
        "dpo", {"beta": BETA, "sft": 0.5}, {"beta": BETA, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "ipo": ("ipo", {"beta": BETA}, {"beta": BETA, "loss_type": ["ipo"]}),
    "kto": (
        "kto", {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.7},
        {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    ),
    "reward": ("reward", {"center": 0.05}, {"center_rewards_coefficient": 0.05}),
}  # fmt: skip


def referenced(workload: TransformerWorkload, model: torch.nn.Module, read: Samples) -> torch.Tensor:
    """The log-probabilities of all records under a model, [records, 2]."""
    from workloads.model.losses import token_loss
    from workloads.objectives.preferences import log_probabilities

    batch = workload.objective.collate(read, range(RECORDS), 0)
    with torch.no_grad():
        return log_probabilities(model(batch).logits, batch["labels"], token_loss)


def begun(workload: TransformerWorkload) -> torch.nn.Module:
    ours = workload.build()
    ours.load_state_dict({tensor: workload.initial(tensor, 0) for tensor in workload.shapes})
    return ours


@pytest.mark.contract
@pytest.mark.proves(
    "loss", objective={"name": {name: case[0] for name, case in CASES.items()}}, family="llama"
)
@pytest.mark.parametrize(
    "name", [name if name == "dpo" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_twenty_steps_have_the_losses_of_trl(name: str, tmp_path: Path) -> None:
    objective, options, theirs = CASES[name]
    kind = "LlamaForSequenceClassification" if objective == "reward" else "LlamaForCausalLM"
    model = model_of(tmp_path / "model", kind, **({"num_labels": 1} if objective == "reward" else {}))
    workload = load(f"hf:{tmp_path / 'model'}", objective, KNOWN, sequence_length=LENGTH, options=options)
    assert workload.notes == ()
    # TRL's sft is the mean over all tokens of a batch, ours that of a pair: equal for chosen answers of one length.
    records = [a_pair(number, said=6 if "sft" in options else 0) for number in range(RECORDS)]
    trainer = trainer_of(objective, tmp_path, model, records, **theirs)
    collated = [trainer.train_dataset[number] for number in range(RECORDS)]
    if objective == "kto":
        firsts = [record[3 : 3 + int(record[1])] for record in records]
        records = [pack([words, [number % 3 > 0]]) for number, words in enumerate(firsts)]
    compare(workload, records, trainer.model, lambda ids: trainer.compute_loss(
        trainer.model, trainer.data_collator([collated[i] for i in ids])))  # fmt: skip


def compare(
    workload: TransformerWorkload,
    records: list[np.ndarray],
    theirs: Any,
    loss_of: Callable[[range], torch.Tensor],
) -> None:
    ours, read = begun(workload), Samples(lambda number: records[number], RECORDS)
    reference = None if workload.objective.name in ("orpo", "reward") else referenced(workload, ours, read)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-4) for each in (ours, theirs)]
    seen: list[float] = []
    baselines = [0.0]
    for step in range(STEPS):
        ids = range(step % 5 * ROWS, (step % 5 + 1) * ROWS)
        batch: Batch = workload.objective.collate(read, ids, 0)
        if reference is not None:
            batch["reference"] = reference[ids.start : ids.stop]
        if workload.objective.name == "kto":  # as an engine does it
            total, count = workload.loss(ours, batch | {"baseline": torch.tensor(0.0)}).sums["divergence"]
            batch["baseline"] = (total / count).clamp(min=0)
            baselines.append(float(batch["baseline"]))
        found = workload.loss(ours, batch)
        losses = [found.total / found.count, loss_of(ids)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen.append(float(losses[0].detach()))
    assert seen[-1] < seen[0]
    assert (max(baselines) > 0.01) == (workload.objective.name == "kto")


@pytest.mark.slow
def test_twenty_steps_of_orpo_have_the_losses_of_trl(tmp_path: Path) -> None:
    """For prompts of one token, whose own tokens TRL adds to the loss, and chosen answers of one length."""
    from accelerate import Accelerator
    from trl.experimental.orpo import ORPOTrainer

    model = model_of(tmp_path / "model", "LlamaForCausalLM")
    workload = load(f"hf:{tmp_path / 'model'}", "orpo", KNOWN, sequence_length=LENGTH, options={"beta": BETA})
    records = [a_pair(number, first=1, said=6) for number in range(RECORDS)]
    trainer = object.__new__(ORPOTrainer)
    trainer.__dict__ |= {
        "beta": BETA, "is_encoder_decoder": False, "padding_value": 1, "aux_loss_enabled": False,
        "accelerator": Accelerator(cpu=True),
    }  # fmt: skip

    def loss_of(ids: range) -> torch.Tensor:
        batch: dict[str, Any] = {}
        for side in ("chosen", "rejected"):
            rows = [rows_of(records[i]) for i in ids]
            full = [torch.tensor((row["prompt_ids"] + row[f"{side}_ids"])[: LENGTH // 2]) for row in rows]
            batch[f"{side}_input_ids"] = torch.nn.utils.rnn.pad_sequence(full, True, 1)
            batch[f"{side}_attention_mask"] = torch.nn.utils.rnn.pad_sequence(
                [ids * 0 + 1 for ids in full], True
            )
            batch[f"{side}_labels"] = torch.nn.utils.rnn.pad_sequence(full, True, -100)
            batch[f"{side}_labels"][:, 0] = -100
        return trainer.get_batch_loss_metrics(model, batch)[0]

    compare(workload, records, model, loss_of)
