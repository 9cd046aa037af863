"""Heads that learned gates close, beside as many that importance (Michel et al., 2019) or chance removes.

Each seed trains a small decoder on the language reference of Python, without every tenth topic. From there each arm
trains as many steps more: with gates and a penalty; with the least important heads removed, by the gradient on training
text and over all layers together; with random heads removed; and with all heads. Prints a table of the loss on the
topics left out.

    python tests/bench/bench_head_gates.py [SEEDS]
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterable
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from workloads.load import load
from workloads.model.dropout import KEYS, row_keys
from workloads.model.head_gates import gates_of, open_probability
from workloads.model.importance import gradient
from workloads.model.stored import is_gates
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

TOKENS, LENGTH, BATCH = 1024, 32, 16
SIZES = {"hidden": 64, "layers": 4, "heads": 8, "kv_heads": 8, "head_dim": 8, "intermediate": 128}
BASE_STEPS, STEPS = 1500, 500
LR, GATES_LR = 2e-3, 4e-2
PENALTIES = (0.01, 0.03)
MEASURED = 64
"""Batches of training text by which importance is measured."""


def text() -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of training, and of the topics left out."""
    names = sorted(topics)
    held_out = [topics[name] for name in names[::10]]
    trained = [topics[name] for number, name in enumerate(names) if number % 10]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(trained, trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=alphabet))
    return tuple(
        np.concatenate([tokenizer.encode(each).ids for each in part]) for part in (trained, held_out)
    )  # type: ignore[return-value]


def rows(tokens: np.ndarray, starts: Iterable[int]) -> dict[str, Tensor]:
    """Return a batch of rows that begin at these tokens."""
    found = torch.from_numpy(np.stack([tokens[at : at + LENGTH + 1] for at in starts]))
    return {"tokens": found[:, :-1], "labels": found[:, 1:]}


def batch_of(tokens: np.ndarray, seed: int, step: int) -> dict[str, Tensor]:
    """Return the batch of a step."""
    draw = np.random.default_rng((seed, step))
    batch = rows(tokens, draw.integers(0, len(tokens) - LENGTH - 1, BATCH))
    return batch | {KEYS: row_keys(seed, step * BATCH, BATCH)}


def loss_of(workload: TransformerWorkload, model: nn.Module, tokens: np.ndarray) -> float:
    """Return the mean loss on whole rows of tokens, in nats."""
    model.eval()
    total = count = 0.0
    starts = range(0, len(tokens) - LENGTH - 1, LENGTH)
    with torch.no_grad():
        for first in range(0, len(starts), 64):
            loss = workload.loss(model, rows(tokens, starts[first : first + 64]))
            total += float(loss.total)
            count += float(loss.count)
    model.train()
    return total / count


def gates_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the gates by the names of their attentions."""
    return {
        name.removesuffix(".gates.log_alpha"): each
        for name, each in model.named_parameters()
        if is_gates(name)
    }


def trained(
    workload: TransformerWorkload,
    model: nn.Module,
    tokens: np.ndarray,
    seed: int,
    steps: range,
    penalty: float,
) -> nn.Module:
    """Train for some steps, with a cosine schedule; gates only with a penalty."""
    gates = list(gates_in(model).values())
    for each in gates:
        each.requires_grad_(penalty > 0)
    weights = [p for name, p in model.named_parameters() if not is_gates(name)]
    groups = [{"params": weights, "lr": LR}, {"params": gates, "lr": GATES_LR, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps), LR * 0.1)
    for step in steps:
        loss = workload.loss(model, batch_of(tokens, seed, step))
        total = loss.total / loss.count
        if penalty:
            total = total + penalty * sum(open_probability(each).sum() for each in gates)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def without(model: nn.Module, removed: Iterable[tuple[str, int]]) -> nn.Module:
    """Return a copy whose gates are shut for these heads and open for the others, whatever is drawn."""
    result = copy.deepcopy(model)
    gates = gates_in(result)
    with torch.no_grad():
        for each in gates.values():
            each.fill_(40.0)
        for name, head in removed:
            gates[name][head] = -40.0
    return result


def main(seeds: int) -> None:
    """Measure, and print a row for each arm."""
    torch.set_num_threads(1)
    tokens, held_out = text()
    print(f"{len(tokens)} tokens to train on, {len(held_out)} held out", flush=True)
    vocabulary = Vocabulary(TOKENS, eos=0)
    for seed in range(1, seeds + 1):
        made: Any = load(
            "llama-tiny",
            "causal_lm",
            vocabulary,
            changes=SIZES,
            sequence_length=LENGTH,
            seed=seed,
            head_gates=True,
        )
        model = made.build()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(made.initial(name, seed))
        began = time.process_time()
        base = trained(made, without(model.train(), ()), tokens, seed, range(BASE_STEPS), 0.0)
        print(f"seed {seed}: base {loss_of(made, base, held_out):.4f}", flush=True)
        later = range(BASE_STEPS, BASE_STEPS + STEPS)
        whole = trained(made, without(base, ()), tokens, seed, later, 0.0)
        print(f"seed {seed}: all heads {loss_of(made, whole, held_out):.4f}", flush=True)
        scores = gradient(
            copy.deepcopy(base),
            made.config,
            made.loss,
            (batch_of(tokens, seed + 100, n) for n in range(MEASURED)),
        )
        heads = [
            (name, head)
            for name, each in scores.items()
            for head in range(len(each))
            if name in gates_in(base)
        ]
        # The scores of a layer are divided by their norm before layers are compared (Michel et al., 2019, section 3.2).
        by_importance = sorted(heads, key=lambda at: float(scores[at[0]][at[1]] / scores[at[0]].norm()))
        chance = [heads[n] for n in np.random.default_rng(seed).permutation(len(heads))]
        for penalty in PENALTIES:
            learned = copy.deepcopy(base)
            for each in gates_in(learned).values():
                nn.init.constant_(each, 2.5)
            trained(made, learned, tokens, seed, later, penalty)
            shut = {name: gates_of(each.detach()) == 0 for name, each in gates_in(learned).items()}
            closed = sum(int(each.sum()) for each in shut.values())
            found = {
                "gates": loss_of(made, learned, held_out),
                "importance": loss_of(
                    made,
                    trained(made, without(base, by_importance[:closed]), tokens, seed, later, 0.0),
                    held_out,
                ),
                "chance": loss_of(
                    made, trained(made, without(base, chance[:closed]), tokens, seed, later, 0.0), held_out
                ),
            }
            by_layer = " ".join(str(int((~each).sum())) for each in shut.values())
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in found.items())
            counts = f"{len(heads) - closed} of {len(heads)} heads open ({by_layer})"
            print(f"seed {seed}: penalty {penalty}: {counts}: {losses}", flush=True)
        print(f"seed {seed}: {time.process_time() - began:.0f} s of a processor", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
