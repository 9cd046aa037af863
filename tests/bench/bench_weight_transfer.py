"""Seconds and bytes of weights on their way to rollout workers: from one rank to the servers of nodes, and from a
server to a rollout worker.

    python tests/bench/bench_weight_transfer.py [rounds]

Each node is a server process on this machine, so the links are loopback. Every version goes to every node once.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import paths  # noqa: F401
import torch

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.train.rollouts import weights
from orchestrator.train.rollouts.replica import WEIGHTS, Replica
from orchestrator.train.rollouts.weights import WeightSender, read_weights
from workloads.hf.check.parity_table import random_state
from workloads.load import load
from workloads.workload import Vocabulary

TOKEN = "secret"
SERVE = """
import sys
from orchestrator.checkpoint.snapshot_server import weight_server
server = weight_server("secret", "127.0.0.1")
print(server.address, flush=True)
sys.stdin.read()
"""
NODES = (1, 2, 4)
SIZES: dict[str, dict[str, Any]] = {
    "hidden 128, 4 layers": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 384},
    "hidden 512, 8 layers": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate": 1536},
}


def served(stack: ExitStack) -> dict[str, str]:
    """Start the server of a node. It ends with the stack."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    return {"node": str(process.pid), "address": process.stdout.readline().strip()}


def measured(changes: dict[str, Any], nodes: int, rounds: int) -> tuple[int, float, float]:
    """Return the bytes of the weights, and the median seconds of sending them to all nodes and of reading them."""
    workload = load(
        "llama-tiny", "causal_lm", Vocabulary(8000, eos=1, pad=0), changes=changes, sequence_length=512
    )
    state = random_state(workload)
    pieces = [
        TensorPiece(WEIGHTS + name, tuple(value.shape), (0,) * value.ndim, value)
        for name, value in state.items()
    ]
    engine: Any = SimpleNamespace(state=lambda: pieces)
    device: Any = SimpleNamespace(device=torch.device("cpu"))
    replica = Replica(workload, device, 0)
    sent, read = [], []
    with ExitStack() as stack:
        stack.enter_context(patch.object(weights, "gather_json", lambda value: [value]))
        servers = [served(stack) for _ in range(nodes)]
        sender = WeightSender(TOKEN, 0, world=1)
        for version in range(rounds + 1):
            began = time.perf_counter()
            sender.send(engine, servers, version=version, attempt=1)
            arrived = time.perf_counter()
            read_weights(replica, TOKEN, servers[-1:], version)
            sent.append(arrived - began)
            read.append(time.perf_counter() - arrived)
    filled = dict(replica.model.named_parameters())
    assert all(torch.equal(filled[name], value) for name, value in state.items() if name in filled)
    size = sum(4 * value.numel() for value in state.values())
    return size, statistics.median(sent[1:]), statistics.median(read[1:])


def main(rounds: int = 9) -> None:
    """Print a row for each size and number of nodes."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {rounds} rounds, medians")
    print("| model | nodes | MB per node | MB in all | ranks send, s | MB/s | a worker reads, s | MB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for title, changes in SIZES.items():
        for nodes in NODES:
            size, sent, read = measured(changes, nodes, rounds)
            mb = size / 1e6
            row = [title, nodes, f"{mb:.1f}", f"{nodes * mb:.1f}", f"{sent:.4f}", f"{nodes * mb / sent:,.0f}"]
            print("| " + " | ".join(map(str, [*row, f"{read:.4f}", f"{mb / read:,.0f}"])) + " |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
