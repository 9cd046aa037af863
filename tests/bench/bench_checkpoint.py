"""What saving costs a training step and what loading under another cut costs, against torch DCP in the same run.

    python tests/bench/bench_checkpoint.py --hidden 512 --steps 40

One process trains a small network on the CPU; all modes save the same tensors of the same state to the same
folder's file system, each with one snapshot of every save in the end. A stall is the time the training loop spends
in the call that saves, waiting for earlier saves included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.saver import Saver

META = {"position": 0, "receipt": ""}
Save = Callable[[int, dict[str, torch.Tensor]], None]


class Trainer:
    """A plain network with AdamW, and its state as one flat namespace."""

    def __init__(self, hidden: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.GELU()) for _ in range(layers)
        ]
        self.model = torch.nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(batch, hidden)
        self.step()

    def step(self) -> None:
        loss = (self.model(self.batch) - self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        state = {}
        for name, parameter in self.model.named_parameters():
            state[f"model.{name}"] = parameter.detach()
            for slot, value in self.optimizer.state[parameter].items():
                state[f"optim.{name}.{slot}"] = value
        return state


class Ours:
    def __init__(self, folder: Path) -> None:
        self.saver = Saver(Store(str(folder)), retention=Retention(keep=2))

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        self.saver.save(step, [full_piece(name, tensor) for name, tensor in state.items()], META)

    def close(self) -> None:
        failed = [outcome for outcome in self.saver.close() if outcome.state == "failed"]
        assert not failed, failed


class Dcp:
    """`async_save` as its documentation has it: a folder a step, the next save waits for the last."""

    def __init__(self, folder: Path, kind: AsyncCheckpointerType) -> None:
        self.folder, self.kind = folder, kind
        self.last: Any = None

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        if self.last is not None:
            self.last.result()
        self.last = dcp.async_save(
            state, checkpoint_id=str(self.folder / f"step-{step}"), async_checkpointer_type=self.kind
        )

    def close(self) -> None:
        if self.last is not None:
            self.last.result()


def train(trainer: Trainer, saver: Any, first: int, steps: int, every: int) -> tuple[float, list[float]]:
    """Seconds for all steps and their saves, without what is still being written at the end; the stalls."""
    stalls = []
    began = time.perf_counter()
    for step in range(first, first + steps):
        trainer.step()
        if every and step % every == 0:
            at = time.perf_counter()
            saver.save(step, trainer.state())
            stalls.append(time.perf_counter() - at)
    return time.perf_counter() - began, stalls


def saving(options: argparse.Namespace, root: Path) -> Iterator[str]:
    """All modes take turns, so that they share what else the machine does; the best round of each counts."""
    trainer = Trainer(options.hidden, options.layers, options.batch)
    kinds: dict[str, Callable[[Path], Any]] = {
        "ours": Ours,
        "DCP async, thread": lambda folder: Dcp(folder, AsyncCheckpointerType.THREAD),
    }
    if options.dcp_process:
        kinds["DCP async, process"] = lambda folder: Dcp(folder, AsyncCheckpointerType.PROCESS)
    modes = [(name, every) for every in (10, 1) for name in kinds]
    plain, best = 1e9, dict.fromkeys(modes, 1e9)
    stalls: dict[tuple[str, int], list[float]] = {mode: [] for mode in modes}
    for turn in range(options.rounds):
        plain = min(plain, train(trainer, None, 1, options.steps, 0)[0])
        for name, every in modes:
            saver = kinds[name](root / f"{name}-{every}-{turn}")
            # the first saves get memory and start processes
            for step in (1, 2, 3):
                saver.save(step, trainer.state())
            seconds, found = train(trainer, saver, 4, options.steps, every)
            saver.close()
            best[name, every] = min(best[name, every], seconds)
            stalls[name, every] += found
    size = sum(tensor.nbytes for tensor in trainer.state().values())
    step = plain / options.steps
    rounds = f"{options.rounds} rounds of {options.steps} steps"
    yield f"State {size / 1e6:.0f} MB, step {step * 1e3:.1f} ms without saves, {rounds}.\n"
    yield "| saves | every | stall, median ms | stall, largest ms | stall / step | throughput lost |"
    yield "|---|---|---|---|---|---|"
    for (name, every), seconds in best.items():
        middle, most = statistics.median(stalls[name, every]), max(stalls[name, every])
        yield (
            f"| {name} | {every} | {middle * 1e3:.1f} | {most * 1e3:.1f} | {middle / step:.1%} "
            f"| {1 - plain / seconds:.1%} |"
        )


def loading(options: argparse.Namespace, root: Path) -> Iterator[str]:
    side = options.load_side
    tensors = {f"model.{number}": torch.randn(side, side) for number in range(options.load_tensors)}
    store = Store(str(root / "load"))
    rows = side // 4
    records = []
    for shard in range(4):
        pieces = [
            TensorPiece(name, (side, side), (rows * shard, 0), t[rows * shard : rows * shard + rows])
            for name, t in tensors.items()
        ]
        records += store.write_shard(1, shard, pieces)
    manifest = store.publish(1, records, META)
    third = -(-side // 3)
    cuts = {
        "as saved, 4 by rows": [((rows * i, 0), (rows, side)) for i in range(4)],
        "one reader": [((0, 0), (side, side))],
        "3 by rows": [((third * i, 0), (min(third, side - third * i), side)) for i in range(3)],
        "2 by columns": [((0, side // 2 * i), (side, side // 2)) for i in range(2)],
    }
    seconds = {}
    for _ in range(3):
        for label, boxes in cuts.items():
            began = time.perf_counter()
            for start, extent in boxes:
                reader = store.reader(manifest)
                for name in tensors:
                    reader.read(name, start, extent)
            seconds[label] = min(seconds.get(label, 1e9), time.perf_counter() - began)
    base = seconds["as saved, 4 by rows"]
    size = sum(tensor.nbytes for tensor in tensors.values())
    yield f"\n{size / 1e6:.0f} MB saved by 4 ranks by rows; the reads of all ranks added up.\n"
    yield "| read by | seconds | over plain |"
    yield "|---|---|---|"
    for label, value in seconds.items():
        yield f"| {label} | {value:.3f} | {value / base:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--load-side", type=int, default=2048)
    parser.add_argument("--load-tensors", type=int, default=8)
    parser.add_argument(
        "--dcp-process", action="store_true", help="also DCP's process mode (starts in some 7 s)"
    )
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        store = dist.FileStore(str(Path(root) / "rendezvous"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for line in saving(options, Path(root)):
            print(line, flush=True)
        for line in loading(options, Path(root)):
            print(line, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
