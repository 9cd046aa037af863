"""The Ray Train V2 peers of `bench_preemption.py`: a plain DDP loop, with or without just-in-time checkpoints, or one
whose replicas torchft keeps alive.

    python preemption_train.py ADDRESS FOLDER WORKERS STEPS INTERVAL PAUSE periodic|jit|torchft

As in ray#65047: a checkpoint every INTERVAL steps, and with jit one more when `get_preemption_info` first returns one.
Rank 0 appends each step that it has done to FOLDER/steps.txt, and each step that an attempt begins with to
FOLDER/resumed.txt. With torchft every rank is a replica; each appends to FOLDER/steps-RANK.txt the steps that it has
done and to FOLDER/failed-RANK.txt those that the replicas did not agree on, which are done again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

WIDTH = 128


def new_model() -> torch.nn.Module:
    """Make the model, with the same weights on every rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def append(config: dict[str, Any], name: str, line: str) -> None:
    """Append a line to a file of the folder."""
    with open(Path(config["folder"]) / name, "a") as file:
        file.write(f"{line}\n")


def train_replica(config: dict[str, Any]) -> None:
    """Train one rank that is a replica of torchft, which goes on with the replicas that are there."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    rank, limit = ray.train.get_context().get_world_rank(), timedelta(seconds=30)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    group = ProcessGroupGloo(timeout=limit)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        world_size=1,
        rank=0,
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
        timeout=2 * limit,
        checkpoint_transport=PGTransport(group, timeout=limit, device=torch.device("cpu")),
    )
    replicated, agreed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    append(config, "resumed.txt", f"{rank}")
    while manager.current_step() < config["steps"]:
        time.sleep(config["pause"])
        batch = torch.randn(16, WIDTH)
        agreed.zero_grad()
        (replicated(batch) - batch).square().mean().backward()
        before = manager.current_step()
        agreed.step()
        step = manager.current_step()
        kind = "steps" if step > before else "failed"
        append(config, f"{kind}-{rank}.txt", f"{step} {time.time()}")
    manager.shutdown()


def train_func(config: dict[str, Any]) -> None:
    """Train one rank."""
    rank = ray.train.get_context().get_world_rank()
    model = torch.nn.parallel.DistributedDataParallel(new_model())
    optimizer = torch.optim.AdamW(model.parameters())
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = int(state["step"])
    if rank == 0:
        append(config, "resumed.txt", f"{begin}")
    has_saved = False
    for step in range(begin + 1, config["steps"] + 1):
        time.sleep(config["pause"])
        batch = torch.randn(16, WIDTH)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            append(config, "steps.txt", f"{step} {time.time()}")
        noticed = config["jit"] and not has_saved and ray.train.get_preemption_info() is not None
        if noticed or step % config["interval"] == 0:
            has_saved = has_saved or noticed
            save(model, optimizer, step, rank)


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """Report a checkpoint of rank 0's state, in which all ranks take part."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    """Train to the end, whatever fails."""
    address, folder, workers, steps, interval, pause, kind = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    config = {
        "folder": folder, "steps": int(steps), "interval": int(interval), "pause": float(pause), "jit": kind == "jit",
    }  # fmt: skip
    failures = FailureConfig(max_failures=100, max_preemption_failures=100)
    torch_config, train = None, train_func
    if kind == "torchft":
        from ray.train.v2.torch.torchft_config import TorchftConfig

        torch_config, train = (
            TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
            train_replica,
        )
    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(name="train", storage_path=f"{folder}/ray_train", failure_config=failures),
    ).fit()


if __name__ == "__main__":
    main()
