"""The real vLLM, where it is installed and there is a GPU. The package in its place is in
`tests/unit/orchestrator/train/rollouts/test_vllm_sampler.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from letters import write_tokenizer
from tokenizers import Tokenizer

from orchestrator.parallel.device import Device
from orchestrator.train.rollouts.config import RolloutSpec
from orchestrator.train.rollouts.sampler import OwnSampler, Unit
from orchestrator.train.rollouts.vllm_sampler import VllmSampler
from workloads.load import load
from workloads.workload import Vocabulary


@pytest.mark.gpu
def test_log_probabilities_are_those_of_own_generation(alone: dist.ProcessGroup, tmp_path: Path) -> None:
    """Both engines compute the most likely answers in bf16, before and after an update of the weights."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    workload = load(
        "qwen3-tiny",
        "grpo",
        vocabulary=Vocabulary(25, eos=5, pad=0),
        sequence_length=64,
        changes={"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512},
    )
    asked = RolloutSpec(group=2, max_tokens=8, workers=1, engine="vllm")  # type: ignore[arg-type]
    device = Device(torch.device("cuda"), torch.bfloat16, alone)
    write_tokenizer(tmp_path, template=False)
    own = OwnSampler(workload, device, 3, asked, ends=[5])
    theirs = VllmSampler(
        workload,
        device,
        seed=3,
        spec=asked,
        ends=[5],
        sequence_length=64,
        tokenizer=Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
    )
    unit = Unit([[6, 7, 8], [9, 10]], [[0, 1], [2, 3]], is_greedy=True)
    for scale in (0.05, 0.2):
        draws = torch.Generator().manual_seed(1)
        for name, tensor in theirs.replica._tensors.items():
            tensor.copy_(torch.randn(tensor.shape, generator=draws) * scale)
            own.replica._tensors[name].copy_(tensor)
        theirs.use_replica()
        for one, other in zip(own.answers_of(unit), theirs.answers_of(unit), strict=True):
            assert one[0].tokens[0] == other[0].tokens[0]
            assert one[0].log_probabilities[0] == pytest.approx(other[0].log_probabilities[0], abs=0.05)
