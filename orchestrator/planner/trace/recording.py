"""Record a step on tensors without memory."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from orchestrator.planner.trace.fake_values import replacement_results
from orchestrator.planner.trace.messages import Messages
from orchestrator.planner.trace.op_cache import CachedOperators
from orchestrator.planner.trace.recorder import Recorder
from orchestrator.planner.trace.sample_batch import predicted_share
from workloads.workload import Batch

CPU = torch.device("cpu")


def recording(batch: Batch, on_cpu: bool) -> tuple[FakeTensorMode, Recorder, Messages]:
    """Return the mode in which tensors have no memory, the recorder of operators, and that of messages.

    Args:
        batch: a micro-batch, whose share of predicted tokens stands for that of all.
        on_cpu: whether the ranks compute on CPUs.
    """
    messages = Messages(on_cpu)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(CPU, replacement_results(predicted_share(batch)), messages, CachedOperators(fake))
    return fake, recorder, messages
