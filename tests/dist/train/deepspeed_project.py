"""The rank program of another project, which uses DeepSpeed as its manual says and saves in its format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from cluster.workers.worker_context import WorkerContext

STAGES = (1, 2, 3)


class Net(nn.Module):
    """Parameters whose sizes no number of ranks divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))) * self.scale


def main(config: dict[str, Any], context: WorkerContext) -> None:
    """Train with every stage, save, and leave the fp32 weights as DeepSpeed gives them for comparison."""
    rank_info = context.rank_info
    os.environ |= {"RANK": str(rank_info.rank), "WORLD_SIZE": str(rank_info.world_size), "LOCAL_RANK": "0",
                   "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    store = context.store or torch.distributed.TCPStore(rank_info.host, context.store_port(), is_master=False)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank_info.rank, world_size=rank_info.world_size
    )
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for stage in STAGES:
        torch.manual_seed(stage)
        net = Net()
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": stage},
                "bf16": {"enabled": stage == 2},
            },
        )
        for _ in range(3):
            x = torch.randn(2, 5, dtype=torch.bfloat16 if stage == 2 else torch.float32)
            engine.backward(engine(x).square().mean())
            engine.step()
        folder = Path(config["folder"]) / f"zero{stage}"
        engine.save_checkpoint(str(folder), client_state={"epoch": 3})
        weights = {n: deepspeed.utils.safe_get_full_fp32_param(p) for n, p in net.named_parameters()}
        if rank_info.rank == 0:
            save_file({n: t.clone() for n, t in weights.items()}, folder / "expected.safetensors")
    torch.distributed.destroy_process_group()
