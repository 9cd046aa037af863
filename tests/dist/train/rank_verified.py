"""The rank program of trials: a few steps under a layout, with a rank that computes wrongly or without one."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_cases import job, micro_batches, workload_of

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.resources import VerifySpec
from orchestrator.parallel.device import COMPUTE, Device, close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.make import make_engine
from orchestrator.train.step_samples import seed_step
from orchestrator.train.verification import ComputedWrongly, Verification, promise_equal_bits


def run_trial(trial: dict[str, Any], device: Device, rank: int) -> dict[str, Any]:
    """Run the steps of a trial until a wrong rank is found.

    Returns {"found", "ranks", "error", "verified", "losses", "sums"}: the step at which ranks were blamed, None if none
    was, and how often the passes of other roles called a collective that sums gradients.
    """
    spec = job(trial)
    layout = Layout(**{"dp": 1, **trial["layout"]})
    device = dataclasses.replace(device, compute=COMPUTE[spec.train.precision])
    workload = workload_of(spec)
    engine: Any = make_engine(spec.engine, workload, layout, device)
    engine.initialise(spec.seed)
    verify = VerifySpec(**trial["verify"]) if trial.get("verify") else None
    exact = promise_equal_bits(spec.train.determinism, device.device) and not trial.get("tolerant")
    verification = Verification(verify, layout, rank, spec.train.precision, exact)
    flaw = trial.get("flaw")
    found: dict[str, Any] = {"found": None, "ranks": [], "error": "", "verified": 0, "losses": [], "sums": 0}
    seconds = []
    for step in range(1, trial["steps"] + 1):
        if flaw is not None and flaw["rank"] == rank and flaw["step"] == step:
            engine.damage(flaw["kind"], flaw["seed"], flaw.get("bit"))
        own = micro_batches(workload, spec, layout, step)
        check = None

        def seed(role: int, step: int = step) -> None:
            seed_step(spec.seed, step, role)

        if verification.is_due(step):
            others = [
                micro_batches(workload, spec, layout, step, replica=each)
                for each in verification.replicas_to_read(step)
            ]
        began = time.perf_counter()
        try:
            if verification.is_due(step):
                with (
                    patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as scatter,
                    patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange,
                ):
                    check = verification.begin(
                        engine, own, others, step=step, verified=found["verified"], seed=seed
                    )
                found["sums"] += scatter.call_count + exchange.call_count
            seed(rank)
            metrics = engine.train_step(own, spec.train.optimizer.lr, check)
        except ComputedWrongly as error:
            found |= {"found": step, "ranks": list(error.ranks), "error": str(error)}
            break
        seconds.append(time.perf_counter() - began)
        if metrics.loss is None or not math.isfinite(metrics.loss + metrics.grad_norm):
            found["error"] = "unstable"  # a run goes back and leaves the samples out
            break
        found["losses"].append(metrics.loss)
        if check is not None:
            found["verified"] = step
    found["state"] = [hash_of(piece.data) for piece in engine.state()]
    found["seconds"] = seconds
    engine.close()
    return found


def hash_of(tensor: torch.Tensor) -> int:
    """The bits of a tensor, as one number."""
    from orchestrator.parallel.witness import bits_of

    return int(bits_of(tensor))


def main(config: dict[str, Any], context: WorkerContext) -> list[dict[str, Any]]:
    """Run the trials in turn; return what each found."""
    asked = job(config["trials"][0])
    device = open_device(asked.train, asked.resources.per_worker, context)
    found = []
    for trial in config["trials"]:
        try:
            found.append(run_trial(trial, device, context.rank_info.rank))
        except Exception as error:
            raise RuntimeError(f"{trial['id']}: {error}") from error
    close_device()
    return found
