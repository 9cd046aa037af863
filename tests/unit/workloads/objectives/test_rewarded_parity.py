"""GRPO here and in TRL's own trainer: losses and gradients of the same answers from the same weights within 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl_models import KNOWN, LENGTH, SIZE, a_tokenizer, model_of

from workloads.load import load
from workloads.objectives.rewarded import (
    ADVANTAGE,
    COUNTED,
    PER_TOKEN,
    REFERENCE_TOKENS,
    SAMPLED,
    TEMPERATURE,
    WEIGHT,
)

ROWS, MOST = 6, 9
PROMPTS = [3 + n % 3 for n in range(ROWS)]
ANSWERS = [1 + n * 4 % MOST for n in range(ROWS)]


def made_up() -> dict[str, Any]:
    """Prompts with answers, their advantages, and log-probabilities then and under a reference, by token."""
    draw = np.random.default_rng(5)
    return {
        "prompts": [draw.integers(6, SIZE, size).tolist() for size in PROMPTS],
        "answers": [draw.integers(6, SIZE, size).tolist() for size in ANSWERS],
        "advantages": draw.normal(size=ROWS).tolist(),
        "sampled": [draw.normal(-np.log(SIZE), 0.3, size).tolist() for size in ANSWERS],
        "reference": [draw.normal(-np.log(SIZE), 0.3, size).tolist() for size in ANSWERS],
    }


def ours(data: dict[str, Any], loss_type: str, is_first: bool) -> dict[str, torch.Tensor]:
    """The rows as `orchestrator.train.rollouts` lays them out."""
    floats = {name: np.zeros((ROWS, LENGTH), np.float32) for name in PER_TOKEN}
    tokens = np.full((ROWS, LENGTH), KNOWN.padding)
    labels = np.full((ROWS, LENGTH), -100)
    for row, (prompt, answer) in enumerate(zip(data["prompts"], data["answers"], strict=True)):
        places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        tokens[row, : len(prompt) + len(answer)] = prompt + answer
        labels[row, places] = answer
        floats[ADVANTAGE][row, places] = data["advantages"][row]
        weight = {"grpo": 1 / len(answer), "dapo": 1.0, "dr_grpo": 1 / MOST}[loss_type]
        floats[WEIGHT][row, places] = weight
        floats[COUNTED][row, places if loss_type == "dapo" else len(prompt) - 1] = 1.0
        floats[SAMPLED][row, places] = data["sampled"][row]
        floats[REFERENCE_TOKENS][row, places] = data["reference"][row]
    if is_first:
        del floats[SAMPLED]
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        **{name: torch.from_numpy(values) for name, values in floats.items()},
    }


def theirs(data: dict[str, Any], is_first: bool) -> dict[str, torch.Tensor | None]:
    """The same as TRL's trainer keeps it: prompts padded at their beginning, answers at their end."""
    first, last = max(PROMPTS), max(ANSWERS)

    def padded(values: list[list[Any]], kind: type, side: str, fill: float) -> torch.Tensor:
        longest = first if side == "left" else last
        rows = [
            [fill] * (longest - len(each)) + each if side == "left" else each + [fill] * (longest - len(each))
            for each in values
        ]
        return torch.tensor(rows, dtype=torch.int64 if kind is int else torch.float32)

    ones = [[1] * size for size in PROMPTS], [[1] * size for size in ANSWERS]
    return {
        "prompt_ids": padded(data["prompts"], int, "left", KNOWN.padding),
        "prompt_mask": padded(ones[0], int, "left", 0),
        "completion_ids": padded(data["answers"], int, "right", KNOWN.padding),
        "completion_mask": padded(ones[1], int, "right", 0),
        "advantages": torch.tensor(data["advantages"]),
        "old_per_token_logps": None if is_first else padded(data["sampled"], float, "right", 0.0),
        "ref_per_token_logps": padded(data["reference"], float, "right", 0.0),
        "num_items_in_batch": torch.tensor(sum(ANSWERS)),
    }


def trainer(folder: Path, model: Any, beta: float = 0.0, **options: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        max_completion_length=MOST,
        bf16=False,
        report_to=[],
        use_cpu=True,
        **options,
    )
    found = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w7"}]),
        processing_class=a_tokenizer(folder),
    )
    found.current_gradient_accumulation_steps = 1
    found.beta = beta  # set late: TRL would load a reference model by its name, and the rows have its values
    return found


@pytest.mark.contract
@pytest.mark.proves("loss", objective="grpo", family="llama")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo"},
        {"loss_type": "grpo", "beta": 0.2},
        {"loss_type": "grpo", "beta": 0.01, "use_bias_correction_kl": False},
        {"loss_type": "dapo", "epsilon_high": 0.28, "epsilon": 0.1},
        {"loss_type": "dr_grpo", "temperature": 0.7},
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.1, "epsilon": 0.02},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
        {"loss_type": "grpo", "delta": 1.5},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_loss_and_gradient_are_those_of_trl(options: dict[str, Any], is_first: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = model_of(folder, "LlamaForCausalLM")
    data = made_up()
    found = trainer(tmp_path, model, **options)
    their_loss = found._compute_loss(found.model, theirs(data, is_first))
    their_loss.backward()
    own = {name: value for name, value in options.items() if name != "temperature"}
    workload = load(f"hf:{folder}", "grpo", KNOWN, options=own, sequence_length=LENGTH)
    mine = workload.build()
    mine.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    batch = ours(data, options["loss_type"], is_first)
    if "temperature" in options:
        batch[TEMPERATURE] = torch.full((ROWS,), options["temperature"])
    loss = workload.loss(mine, batch)
    mean = loss.total / loss.count
    mean.backward()
    assert mean.item() == pytest.approx(their_loss.item(), abs=1e-5)
    norms = [
        sum(float(p.grad.double().square().sum()) for p in each.parameters() if p.grad is not None)
        for each in (mine, found.model)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    there = found.model.model.layers[0].mlp.down_proj.weight.grad
    here = dict(mine.named_parameters())["layers.0.feedforward.down.weight"].grad
    assert torch.allclose(here, there, atol=1e-5)
    if not is_first:  # else no case would show that clipping is the same
        total, count = loss.sums["clip_share"]
        assert 0 < total.item() < count.item()


def test_the_gradient_of_reinforce_is_that_of_rloo(tmp_path: Path) -> None:
    """In the first update. TRL sums over the tokens of an answer; `dr_grpo` divides that sum by the longest answer's.

    Later updates differ: TRL clips the ratio of whole answers, which reinforce has not.
    """
    from trl import RLOOConfig, RLOOTrainer

    folder = tmp_path / "model"
    model = model_of(folder, "LlamaForCausalLM")
    data = made_up()
    config = RLOOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=ROWS, num_generations=ROWS,
        max_completion_length=MOST, bf16=False, report_to=[], use_cpu=True, beta=0.0,
    )  # fmt: skip
    found = RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w7"}]),
        processing_class=a_tokenizer(folder),
    )
    given = theirs(data, is_first=True)
    workload = load(
        f"hf:{folder}", "reinforce", KNOWN, options={"loss_type": "dr_grpo"}, sequence_length=LENGTH
    )
    mine = workload.build()
    mine.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    batch = ours(data, "dr_grpo", is_first=True)
    loss = workload.loss(mine, batch)
    (loss.total / loss.count * MOST).backward()
    with torch.no_grad():
        log_p, _, _ = found._get_per_token_logps_and_entropies(
            found.model,
            torch.cat([given["prompt_ids"], given["completion_ids"]], 1),
            torch.cat([given["prompt_mask"], given["completion_mask"]], 1),
            max(ANSWERS),
        )
    found._compute_loss(
        found.model, {**given, "old_logps": (log_p * given["completion_mask"]).sum(1)}
    ).backward()
    there = found.model.model.layers[0].mlp.down_proj.weight.grad
    here = dict(mine.named_parameters())["layers.0.feedforward.down.weight"].grad
    assert torch.allclose(here, there, rtol=1e-4, atol=1e-5)
    assert there.abs().max() > 1e-3
