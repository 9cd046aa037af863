"""A stage of torch's pipelines that holds what it receives and sends for only as long as it is needed.

torch allocates a buffer for each micro-batch of a step in both directions, before the first step, and keeps them to the
end, with the gradients of what it has received; schedules of several stages a rank also keep all that they send. Of
Llama 3 8B at 4,096 tokens these are 64 MiB each: 64 micro-batches take 8 to 20 GiB beside what the schedule needs. This
overrides private methods of torch's class: another version of torch may have others, which
`tests/unit/orchestrator/parallel/test_pipeline_stage.py` would show.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules


class Stage(PipelineStage):
    """As `PipelineStage`, for plain tensors whose shapes were given.

    Where a schedule sends each message in a batch of its own, `sends_alone`, the stage sends itself, and lets go of
    what has arrived. Of gloo that is known only by waiting, which takes no time where the answer is here; what has none
    is waited for at the end of the step.
    """

    def __init__(self, *given: Any, sends_alone: bool, **named: Any) -> None:
        super().__init__(*given, **named)
        self._sends_alone = sends_alone
        self._outputs: dict[int, list[dist.Work]] = {}
        self._gradients: list[dist.Work] = []

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        first = self.args_recv_info[0]
        for number in range(num_microbatches):
            self.args_recv_info[number] = tuple(_without_buffer(info) for info in first)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        first = self.grad_recv_info[0]
        for number in range(num_microbatches):
            self.grad_recv_info[number] = tuple(_without_buffer(info) for info in first)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of a micro-batch's input."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a micro-batch's output, if the schedule is to do them."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self._sends_alone:
            return ops
        self._outputs = {number: left for number, works in self._outputs.items() if (left := _left(works))}
        self._outputs[fwd_chunk_id] = _begun(ops)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the gradient of a micro-batch's input, if the schedule is to do them."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if not self._sends_alone:
            return ops
        self._gradients = [*_left(self._gradients), *_begun(ops)]
        return []

    def wait_for_sends(self) -> None:
        """Wait for all that this stage has sent in a step."""
        for work in [*(work for works in self._outputs.values() for work in works), *self._gradients]:
            work.wait()
        self._outputs, self._gradients = {}, []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the gradient of a micro-batch's output."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """The gradient of an output that another stage of this rank has read; zeros where there is none."""
        infos = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        self._allocate(tuple(info for info, gradient in infos if gradient is None))
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """The forward pass of a micro-batch; its input lives on in what the backward pass needs."""
        output = super().forward_one_chunk(fwd_chunk_id, *given, **named)
        _free(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> None:
        """The backward pass of a micro-batch."""
        super().backward_one_chunk(bwd_chunk_id, *given, **named)
        for work in self._outputs.pop(bwd_chunk_id, ()):
            work.wait()  # the gradient of what was sent is here
        if self.has_backward:
            _free(self.grad_recv_info[bwd_chunk_id])

    def _allocate(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty_strided(
                    meta.shape, meta.stride, dtype=meta.dtype, device=self.device
                )


def _begun(ops: list[dist.P2POp]) -> list[dist.Work]:
    return list(schedules._batch_p2p(ops))


def _left(works: list[dist.Work]) -> list[dist.Work]:
    return [work for work in works if not work.is_completed()]


def _without_buffer(info: Any) -> Any:
    found = copy.copy(info)
    found.buffer = None
    return found


def _free(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None
