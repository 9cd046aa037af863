"""The cost of an evaluation: over the same samples as a plain torch loop, in interleaved pairs.

One process, one thread, the quickstart's model. Both compute loss, and count right predictions; ours also rounds, adds
and agrees with other ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import paths  # noqa: F401

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from jobs import job, write_text
from prepared import prepare_here

from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.config.spec import parse
from orchestrator.data.store.tokens import Tokens
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.training_inputs import TrainingInputs, training_inputs
from orchestrator.train.engines.torch_engine import TorchEngine
from orchestrator.train.evaluation import Evaluator

MICRO_BATCH = 16


def plain(model: torch.nn.Module, inputs: TrainingInputs) -> float:
    """The mean loss of the set by a loop as one would write it."""
    held_out = inputs.sets["validation"]
    total, tokens, right = 0.0, 0, 0
    model.eval()
    with torch.no_grad():
        for first in range(0, held_out.samples, MICRO_BATCH):
            batch = held_out.batch(range(first, min(first + MICRO_BATCH, held_out.samples)))
            logits, labels = model(batch).logits.flatten(0, 1), batch["labels"].flatten()
            total += float(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            predicted = labels != -100
            tokens += int(predicted.sum())
            right += int(((logits.argmax(-1) == labels) & predicted).sum())
    model.train()
    return total / tokens


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=5)
    pairs = options.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        document = job(write_text(Path(folder), 10**9))
        document["workload"] = {"model": "gpt-tiny"}
        document["data"] |= {"sequence_length": 128, "tokenizer": {"train_bpe": 4096}}
        document["data"]["validation"] = {"share": 0.5}
        document["evaluate"] = {}
        document["train"]["global_batch"] = 2 * MICRO_BATCH
        spec = parse(document)
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        info = RankInfo(0, 1, 0, "127.0.0.1", port)
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        context = WorkerContext(info, store)
        device = open_device(spec.train, spec.resources.per_worker, context)
        inputs = training_inputs(spec, Tokens.open(prepare_here(spec, folder)))
        layout = Layout(micro_batch=MICRO_BATCH)
        engine = TorchEngine(spec.engine, inputs.workload, layout, device)
        engine.initialise(spec.seed)
        evaluator = Evaluator(
            layout,
            context,
            engine,
            inputs,
            evaluate=spec.evaluate,
            stop_when=spec.stop_when,
            train=spec.train,
            sequence_length=spec.data.sequence_length,
            classes=0,
            cut=lambda batch: batch,
            measured={},
            has_average=False,
        )
        model = engine.parallel.stages[0]
        ratios = []
        for number in range(-1, pairs):
            began = time.perf_counter()
            theirs = plain(model, inputs)
            middle = time.perf_counter()
            row = evaluator.evaluate(0, 1)
            ended = time.perf_counter()
            assert row is not None
            assert abs(row["sets"]["validation"]["loss"] - theirs) < 1e-6 * theirs
            if number >= 0:  # the first pair warms up
                ratios.append((ended - middle) / (middle - began))
                print(
                    f"pair {number}: {middle - began:.2f} s plain, {ended - middle:.2f} s ours",
                    file=sys.stderr,
                )
        close_device()
    print("| an evaluation over a plain loop | median | least | most |\n|---|---|---|---|")
    print(f"| ratio | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |")


if __name__ == "__main__":
    main()
