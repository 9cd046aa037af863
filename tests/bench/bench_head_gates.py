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
from collections.abc import Iterable, Sequence
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
BASE_STEPS, STEPS = 1000, 300
LR, GATES_LR = 2e-3, 0.1
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
    penalty: float = 0.0,
    removed: Iterable[tuple[str, int]] = (),
) -> nn.Module:
    """Train for some steps, with a cosine schedule.

    Args:
        workload: the model's.
        model: trained in place.
        tokens: those of training.
        seed: of the batches.
        steps: their numbers.
        penalty: of each open gate, if the model has gates.
        removed: heads, by attention and number, whose part of the output projection is 0 and stays so.
    """
    masks = {}
    for name, head in removed:
        weight = model.get_parameter(f"{name}.output.weight")
        mask = masks.setdefault(weight, torch.ones_like(weight))
        mask[:, head * SIZES["head_dim"] : (head + 1) * SIZES["head_dim"]] = 0.0
    for weight, mask in masks.items():
        weight.data.mul_(mask)
        weight.register_hook(lambda gradient, mask=mask: gradient * mask)
    gates = list(gates_in(model).values())
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


def workload_of(seed: int, head_gates: bool) -> TransformerWorkload:
    """Return the model of a seed."""
    made: Any = load(
        "llama-tiny",
        "causal_lm",
        Vocabulary(TOKENS, eos=0),
        changes=SIZES,
        sequence_length=LENGTH,
        seed=seed,
        head_gates=head_gates,
    )
    return made


def begun(workload: TransformerWorkload, seed: int, weights: dict[str, Tensor]) -> nn.Module:
    """Return a model with these weights; others have their initial values."""
    model = workload.build()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights.get(name, workload.initial(name, seed)))
    return model


def measure(seed: int, tokens: np.ndarray, held_out: np.ndarray) -> None:
    """Measure all arms of a seed, and print a line for each of them.

    Args:
        seed: of weights, batches and chance.
        tokens: those of training.
        held_out: those on which losses are measured.
    """
    began = time.process_time()
    plain, gated = workload_of(seed, False), workload_of(seed, True)
    base = trained(plain, begun(plain, seed, {}), tokens, seed, range(BASE_STEPS))
    print(f"seed {seed}: base {loss_of(plain, base, held_out):.4f}", flush=True)
    later = range(BASE_STEPS, BASE_STEPS + STEPS)
    batches = (batch_of(tokens, seed + 100, number) for number in range(MEASURED))
    scores = gradient(copy.deepcopy(base), plain.config, plain.loss, batches)
    heads = [
        (name, head)
        for name, each in scores.items()
        if name.endswith("attention")
        for head in range(len(each))
    ]
    # The scores of a layer are divided by their norm before layers are compared, as Michel et al., 2019, do.
    by_importance = sorted(heads, key=lambda at: float(scores[at[0]][at[1]] / scores[at[0]].norm()))
    chance = [heads[number] for number in np.random.default_rng(seed).permutation(len(heads))]

    def after(order: Sequence[tuple[str, int]], count: int) -> float:
        model = begun(plain, seed, base.state_dict())
        return loss_of(plain, trained(plain, model, tokens, seed, later, removed=order[:count]), held_out)

    for penalty in PENALTIES:
        learned = trained(gated, begun(gated, seed, base.state_dict()), tokens, seed, later, penalty)
        still_open = {
            name: int((gates_of(each.detach()) > 0).sum()) for name, each in gates_in(learned).items()
        }
        kept = sum(still_open.values())
        counts = f"{kept} of {len(heads)} heads open ({' '.join(map(str, still_open.values()))})"
        losses = {"gates": loss_of(gated, learned, held_out)}
        print(f"seed {seed}: penalty {penalty}: {counts}: gates {losses['gates']:.4f}", flush=True)
        losses["importance"] = after(by_importance, len(heads) - kept)
        losses["chance"] = after(chance, len(heads) - kept)
        text_of = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        print(f"seed {seed}: penalty {penalty}: {counts}: {text_of}", flush=True)
    print(f"seed {seed}: all heads {after(heads, 0):.4f}", flush=True)
    print(f"seed {seed}: {time.process_time() - began:.0f} s of a processor", flush=True)


def main(seeds: int) -> None:
    """Measure some seeds."""
    torch.set_num_threads(1)
    tokens, held_out = text()
    print(f"{len(tokens)} tokens to train on, {len(held_out)} held out", flush=True)
    for seed in range(1, seeds + 1):
        measure(seed, tokens, held_out)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
