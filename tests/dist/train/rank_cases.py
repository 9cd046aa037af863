"""The rank program of the parity tests: one spawn runs many cases, each a model under a layout."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from texts import Corpus

from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.records import COLUMNS, PREFERENCES, REFERENCED, REWARDED
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.samples.batches import slices
from orchestrator.parallel.arithmetic import ARITHMETIC, NEWEST
from orchestrator.parallel.device import COMPUTE, Device, close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.resolve.resolved_job import adapter_of
from orchestrator.resolve.teacher import compared
from orchestrator.train.engines.engine import Engine
from orchestrator.train.engines.make import make_engine
from orchestrator.train.unlabelled import filled_up
from workloads.adapters.frozen import frozen_by
from workloads.load import load
from workloads.model.dropout import KEYS, row_keys
from workloads.objectives.preferences import means
from workloads.objectives.rewarded import ADVANTAGE, COUNTED, PER_TOKEN, REFERENCE_TOKENS, SAMPLED, WEIGHT
from workloads.record_format import CLOSE, MARK, pack, to_bits
from workloads.workload import Batch, Vocabulary, Workload

SIZE, LENGTH = 160, 16
MOST = 8
"""Maximum tokens of a rewarded answer."""
VOCABULARY = Vocabulary(SIZE, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)), added=150,
                        word_start=np.ones(SIZE, bool), sentence_end=np.arange(SIZE) % 7 == 0)  # fmt: skip
AT_ONCE = 10
"""Tokens whose logits a head computes at once where there are several ranks; one process computes all at once. Not
under Lion, which takes the sign of gradients that are nothing but rounding (a key's bias)."""
SMALL = {"hidden": 32, "heads": 4, "intermediate": 64, "layers": 2, "max_positions": 64}

WITH_REWARDS = {"rewards": [{"kind": "exact_match"}], "rollout": {"group": 2, "max_tokens": MOST}}


def job(case: dict[str, Any]) -> JobSpec:
    """The job file of a case."""
    optimizer = {"lr": 2e-3, "eps": 1e-4, "clip": 1.0, "schedule": "constant", **case.get("optimizer", {})}
    train = {"steps": 100, "global_batch": 8, "optimizer": optimizer, **case.get("train", {})}
    return parse({
        "name": "parity",
        "seed": case.get("seed", 3),
        "workload": {
            "model": case["model"],
            "changes": case["changes"] if "hf:" in case["model"] else {**SMALL, **case.get("changes", {})},
            "objective": case.get("objective", "causal_lm"),
            "mup": case.get("mup"),
            "dropout": case.get("dropout", 0.0),
            "attention_dropout": case.get("attention_dropout", 0.0),
            "layer_drop": case.get("layer_drop", 0.0),
            "head_penalty": case.get("head_penalty", 0.0),
            "adapter": case.get("adapter"),
            "options": case.get("options", {}),
        },
        "data": {
            "sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": LENGTH,
            "labels": case.get("labels", []),
        },
        "train": train,
        "checkpoint": {"average": case.get("average"), "export": case.get("export", "hf")},
        "distill": case.get("distill"),
        "prune": case.get("prune"),
        "quantize": case.get("quantize"),
        **(WITH_REWARDS if case.get("objective") in REWARDED else {}),
    })  # fmt: skip


def workload_of(spec: JobSpec) -> Workload:
    """The case's workload over a made-up vocabulary."""
    asked = spec.workload
    workload = load(
        asked.model,
        asked.objective,
        VOCABULARY,
        changes=asked.changes,
        options=asked.options,
        mup=asked.mup,
        dropout=asked.dropouts[0],
        attention_dropout=asked.dropouts[1],
        layer_drop=asked.layer_drop,
        head_gates=asked.head_penalty > 0,
        sequence_length=LENGTH,
        seed=spec.seed,
        labels=spec.data.labels,
        adapter=adapter_of(spec.workload),
    )
    return dataclasses.replace(workload, frozen=workload.frozen | frozen_by(spec.train.freeze, workload))


def teacher_of(case: dict[str, Any], spec: JobSpec) -> Workload:
    """The teacher of a case: another model with random weights of its own."""
    theirs = job(
        {**case, "model": case["teacher"]["model"], "changes": case["teacher"]["changes"], "distill": None}
    )
    made = workload_of(theirs.with_parts(workload=theirs.workload.model_copy(update={"adapter": None})))
    return dataclasses.replace(made, objective=workload_of(spec).objective)


def record_of(objective: str, sample: int) -> np.ndarray:
    """A record for an objective that reads such: a function of its number."""
    draw = np.random.default_rng(sample)
    text = draw.integers(6, 50, draw.integers(3, LENGTH))
    match objective:
        case "sequence_classification":
            return pack([text, draw.integers(6, 50, 4) if sample % 2 else [], [sample % 3]])
        case "multi_label_classification":
            return pack([text, [], [label for label in range(3) if (sample >> label) % 2]])
        case "sentence_embeddings":
            return pack([text[: 2 + sample % 5], text[-3:]])
        case "regression":
            return pack([text, [], [to_bits(sample % 7 / 3)]])
        case "token_classification":
            return pack([text, np.arange(len(text)) % 4])
        case "span_extraction":
            return pack([text[:3], text, [sample % 2, sample % 2 * 2]])
        case "seq2seq":
            return pack([text, text[::-1]])
    if objective in REWARDED:
        return pack([text, [ord("{"), ord("}")]])
    if objective in PREFERENCES:  # answers of 2 to 7 tokens after a prompt of two, of which some are cut
        sizes = (2 + sample % 6, 2 + sample * 5 % 6)
        said = [np.concatenate([text[:2], draw.integers(6, 50, size) | MARK]) for size in sizes]
        return pack([said[0], [sample % 3 > 0]] if objective == "kto" else said)
    said = np.tile(text, 2)
    talks = [np.where(np.arange(size) > 2, said[:size] | MARK, said[:size]) for size in (6, 5)]
    return np.concatenate([talks[0], [CLOSE], talks[1]])


def micro_batches(
    workload: Workload,
    spec: JobSpec,
    layout: Layout,
    step: int,
    ragged: bool = False,
    replica: int | None = None,
) -> list[Batch]:
    """This rank's micro-batches of a step, or those of another replica: random tokens, a function of the sample's
    number; if `ragged`, padded."""
    window = workload.objective.window(LENGTH)

    def sample_of(sample: int) -> np.ndarray:
        if workload.objective.name in COLUMNS:
            return record_of(workload.objective.name, sample)
        tokens = np.random.default_rng(sample).integers(6, 50, window)
        if spec.workload.options.get("documents") == "isolate":
            tokens[sample % 3 + 4 :: 7] = workload.vocabulary.eos
        return tokens

    read = Corpus(sample_of)

    size = spec.train.global_batch
    replica = layout.coordinate(dist.get_rank())["dp"] if replica is None else replica
    mine = slices(step * size, size, replica, layout.dp, layout.micro_batch)
    batches = [workload.objective.collate(read, range(start, start + count), 0) for start, count in mine]
    if workload.objective.name in REWARDED:
        for batch, (start, count) in zip(batches, mine, strict=True):
            rows = [answered_row(workload.objective, sample) for sample in range(start, start + count)]
            del batch["padding"]  # that of the prompts alone
            batch |= {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    if workload.objective.name in REFERENCED:
        for batch, (start, count) in zip(batches, mine, strict=True):
            batch["reference"] = torch.tensor(
                [[-20.0 - n % 3, -21.0 - n % 4] for n in range(start, start + count)]
            )
    if spec.workload.draws:
        for batch, (start, count) in zip(batches, mine, strict=True):
            batch[KEYS] = row_keys(spec.seed, start, count)
    if ragged:
        for batch, (start, count) in zip(batches, mine, strict=True):
            _pad(batch, start, count)
    return filled_up(batches, layout.accumulation(size), layout.micro_batch)


def answered_row(objective: Any, sample: int) -> dict[str, np.ndarray]:
    """A prompt with a rewarded answer, a function of its number. The probabilities when it was generated are like those
    of an untrained model, so that some ratios are clipped."""
    draw = np.random.default_rng(sample)
    prompt, answer = 2 + sample % 5, 1 + sample * 3 % MOST
    places = slice(prompt - 1, prompt - 1 + answer)
    tokens = np.full(LENGTH, VOCABULARY.padding)
    tokens[: prompt + answer] = draw.integers(6, 50, prompt + answer)
    labels = np.full(LENGTH, -100)
    labels[places] = tokens[prompt : prompt + answer]
    row = {name: np.zeros(LENGTH, np.float32) for name in PER_TOKEN}
    row[ADVANTAGE][places] = draw.normal()
    is_by_token = objective.loss_type == "dapo"
    row[WEIGHT][places] = {"dapo": 1.0, "grpo": 1.0 / answer, "dr_grpo": 1.0 / MOST}[objective.loss_type]
    row[COUNTED][places if is_by_token else prompt - 1] = 1.0
    for name in (SAMPLED, REFERENCE_TOKENS):
        row[name][places] = draw.normal(-np.log(SIZE), 0.25, answer)
    return {"tokens": tokens, "labels": labels, **row}


def _pad(batch: Batch, start: int, count: int) -> None:
    """Make the end of every sequence padding, by 0 to 8 tokens."""
    for name, tokens in (("padding", "tokens"), ("decoder_padding", "decoder_tokens")):
        if tokens in batch:
            length = batch[tokens].shape[1]
            left = torch.tensor([5 * sample % 9 for sample in range(start, start + count)])
            batch[name] = torch.arange(length) < length - left.unsqueeze(1)
    batch["labels"][~batch.get("decoder_padding", batch["padding"])] = -100


def assemble(engine: Engine) -> dict[str, torch.Tensor] | None:
    """The whole state from all ranks' pieces, on rank 0. Raises AssertionError unless they tile it once."""
    mine = [
        (p.name, tuple(p.shape), tuple(p.start), p.data.detach().cpu().contiguous()) for p in engine.state()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    # As arrays of bytes: pickling thousands of small tensors takes longer than the steps.
    sent = [
        (*about, data.dtype, data.shape, data.reshape(-1).view(torch.uint8).numpy()) for *about, data in mine
    ]
    dist.gather_object(sent, everyone if dist.get_rank() == 0 else None)
    if dist.get_rank():
        return None
    state: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, shape, start, dtype, part, sent_bytes in (piece for pieces in everyone for piece in pieces):
        data = torch.from_numpy(sent_bytes.copy()).view(dtype).reshape(part)
        whole = state.setdefault(name, torch.zeros(shape, dtype=dtype))
        times = seen.setdefault(name, torch.zeros(shape, dtype=torch.int8))
        place = tuple(slice(at, at + n) for at, n in zip(start, data.shape, strict=True))
        whole[place] = data
        times[place] += 1
    for name, times in seen.items():
        assert bool((times == 1).all()), f"{name} is not saved exactly once"
    return state


def commit(engine: Engine, uri: str, step: int) -> None:
    """Publish a commit as the loop does."""
    store = Store(uri)
    records = gather_json(store.write_shard(step, dist.get_rank(), engine.state()))
    if dist.get_rank() == 0:
        store.publish(
            step, [r for part in records for r in part], {"position": 0, "receipt": "", ARITHMETIC: NEWEST}
        )
    dist.barrier()


@contextlib.contextmanager
def saved_meanwhile(engine: Engine) -> Iterator[None]:
    """A save copies the state while the block runs: until `before_change` is called, no piece may change."""
    pieces = list(engine.state())
    copies = [piece.data.clone() for piece in pieces]

    def compare() -> None:
        engine.before_change = lambda: None
        changed = [
            piece.name
            for piece, copy in zip(pieces, copies, strict=True)
            if not torch.equal(piece.data, copy)
        ]
        assert not changed, f"changed while they may be copied: {changed}"

    engine.before_change = compare
    yield
    if engine.before_change is compare:
        compare()  # nothing was to change, as in a step that is skipped


def run_case(case: dict[str, Any], folder: Path, device: Device) -> None:
    """Train a few steps; rank 0 leaves losses, norms and final state in `<folder>/<id>.pt`.

    With `restore` the run goes on from that case's commit; with `commit` it leaves one. At each
    [rank, step] in `overflow`, steps counted from 0, the gradients are infinite. A case with a moving average is
    evaluated with it after every step; what that gives is in `averaged`. One that is to be `evaluated` is so before
    every step.
    """
    spec = job(case)
    layout = Layout(**{"dp": 1, **case["layout"]})
    device = dataclasses.replace(device, compute=COMPUTE[spec.train.precision])
    workload = workload_of(spec)
    teacher, held = None, 0
    if spec.distill is not None:
        workload, teacher = compared(spec.distill, workload, teacher_of(case, spec))
    engine: Any = make_engine(spec.engine, workload, layout, device)
    if teacher is not None:
        engine.hold_teacher(teacher, "")
        held = sum(tensor.numel() for tensor in engine.passes.teacher.resident_tensors())
    step_losses = engine.losses if layout.engine == "deepspeed" else engine.passes.losses
    if layout.world > 1 and spec.train.determinism == "rerun" and spec.train.optimizer.name != "lion":
        step_losses._tokens_at_once = AT_ONCE
    start, steps = 0, case.get("steps", 3)
    if "restore" in case:
        store = Store(str(folder / case["restore"]))
        (start,) = store.steps()
        engine.load(store.reader(store.manifest(start)))
    else:
        engine.initialise(spec.seed)
    first = assemble(engine)
    losses, norms, extras, averaged, layers = [], [], [], [], []
    of = step_losses.of
    for step in range(start, start + steps):
        infinite = [dist.get_rank(), step] in case.get("overflow", [])
        step_losses.of = (lambda *call, **keywords: of(*call, **keywords) * math.inf) if infinite else of
        batches = micro_batches(workload, spec, layout, step, case.get("ragged", False))
        if case.get("evaluated"):
            engine.eval_step(micro_batches(workload, spec, layout, 99))
        with saved_meanwhile(engine):
            metrics = engine.train_step(batches, spec.train.optimizer.lr)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
        extras.append(metrics.extra)
        layers.append(metrics.layers)
        if spec.checkpoint.ema is not None:
            with saved_meanwhile(engine):
                engine.swap_average()
            sums = engine.eval_step(micro_batches(workload, spec, layout, 99))
            averaged.append(sums.loss / sums.tokens)
            engine.swap_average()
    state = assemble(engine)
    if case.get("commit"):
        commit(engine, str(folder / case["id"]), start + steps)
    sums = engine.eval_step(micro_batches(workload, spec, layout, 99))
    evaluated = {"loss": sums.loss / sums.tokens, "tokens": sums.tokens, "correct": sums.correct}
    # not the difference of two of them, which has fewer digits
    evaluated |= {name: value for name, value in means(sums.sums).items() if name != "reward_margin"}
    if spec.workload.objective in REFERENCED:
        found = engine.log_probabilities(micro_batches(workload, spec, layout, 98))
        said = sum((each.sum(0) for each in found), torch.zeros(2))
        dist.all_reduce(said)
        evaluated["said"] = said.tolist()
    if spec.workload.objective in REWARDED:
        evaluated["said"] = said_of_tokens(engine, micro_batches(workload, spec, layout, 98), layout)
    engine.close()
    if dist.get_rank() == 0:
        found = {"losses": losses, "norms": norms, "extras": extras, "eval": evaluated, "averaged": averaged}
        found["layers"] = layers
        found["held"] = held
        found["busy"] = metrics.busy_seconds
        torch.save({**found, "first": first, "state": state}, folder / f"{case['id']}.pt")


def said_of_tokens(engine: Engine, batches: list[Batch], layout: Layout) -> list[float]:
    """The sums of log-probabilities by place, over the rows of all ranks."""
    place = layout.coordinate(dist.get_rank())
    said = sum((each.sum(0).float() for each in engine.token_log_probabilities(batches)), torch.zeros(LENGTH))
    if place["tp"] or place["cp"]:  # the same as on another rank; other stages of a pipeline have zeros
        said = torch.zeros(LENGTH)
    dist.all_reduce(said)
    return said.tolist()


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, str]:
    """Run the cases in turn. Returns the error of each case that failed on this rank."""
    device = open_device((asked := job(config["cases"][0])).train, asked.resources.per_worker, context)
    for case in config["cases"]:
        try:
            run_case(case, Path(config["folder"]), device)
        except Exception as error:
            raise RuntimeError(f"{case['id']}: {error}") from error
    close_device()
    return {}
