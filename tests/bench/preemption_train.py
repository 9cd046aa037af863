"""The Ray Train V2 peer of `bench_preemption.py`: a plain DDP loop, with or without just-in-time checkpoints.

    python preemption_train.py ADDRESS FOLDER WORKERS STEPS INTERVAL PAUSE periodic|jit

As in ray#65047: a checkpoint every INTERVAL steps, and with jit one more when `get_preemption_info` first returns one.
Rank 0 appends each step that it has done to FOLDER/steps.txt, and each step that an attempt begins with to
FOLDER/resumed.txt.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

WIDTH = 128


def train_func(config: dict[str, Any]) -> None:
    """Train one rank."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = int(state["step"])
    if rank == 0:
        with open(Path(config["folder"]) / "resumed.txt", "a") as file:
            file.write(f"{begin}\n")
    has_saved = False
    for step in range(begin + 1, config["steps"] + 1):
        time.sleep(config["pause"])
        batch = torch.randn(16, WIDTH)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            with open(Path(config["folder"]) / "steps.txt", "a") as file:
                file.write(f"{step} {time.time()}\n")
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
    TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(name="train", storage_path=f"{folder}/ray_train", failure_config=failures),
    ).fit()


if __name__ == "__main__":
    main()
