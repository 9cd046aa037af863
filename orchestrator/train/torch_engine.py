"""The torch-native engine. This version replicates the model over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.checkpoint.pieces import Piece
from orchestrator.checkpoint.reader import Reader
from orchestrator.layout import Layout
from orchestrator.spec import JobSpec
from orchestrator.train.device import Device
from orchestrator.train.engine import Metrics
from orchestrator.train.reduce import GradientReducer
from workloads.workload import Batch, Workload

SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's optimiser state of one parameter: first and second moment."""


class TorchEngine:
    """Data parallelism over all ranks: gradients are summed while the backward pass runs."""

    def __init__(self, spec: JobSpec, workload: Workload, layout: Layout, device: Device) -> None:
        self._spec, self._workload, self._layout, self._device = spec, workload, layout, device
        self._group = device.group
        with torch.device("meta"):
            self.model = workload.build()
        self.model.to_empty(device=device.device)
        self.model.train()
        self._parameters = dict(self.model.named_parameters())
        self._buffers = {n: b for n, b in self.model.named_buffers() if n in self.model.state_dict()}
        self._reducer = GradientReducer(self._parameters.values(), self._group)
        self._optimizer = self._make_optimizer()
        # The sum of losses is divided by the tokens that a full batch predicts before the backward pass, so
        # that gradients have their usual size in any type, and corrected to the true count after it.
        self._expected = float(spec.train.global_batch * spec.data.sequence_length)

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> Metrics:
        """See `Engine.train_step`."""
        self._reducer.zero()
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(micro_batches):
            if number == len(micro_batches) - 1:
                self._reducer.arm()
            self._forward(batch, len(micro_batches), sums).backward()
        self._reducer.wait()
        loss, extra, factor = self._over_ranks(sums)
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        norm = nn.utils.get_total_norm(gradients)
        if self._spec.train.optimizer.clip is not None:
            nn.utils.clip_grads_with_norm_(self._parameters.values(), self._spec.train.optimizer.clip, norm)
        grad_norm = float(norm)
        if grad_norm == grad_norm and abs(grad_norm) != float("inf"):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return Metrics(loss, grad_norm, extra)

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[Batch]) -> Metrics:
        """See `Engine.eval_step`."""
        self.model.eval()
        sums: dict[str, Tensor] = {}
        for batch in micro_batches:
            self._forward(batch, len(micro_batches), sums)
        self.model.train()
        loss, extra, _ = self._over_ranks(sums)
        return Metrics(loss, 0.0, extra)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """See `Engine.initialise`."""
        for name, tensor in {**self._parameters, **self._buffers}.items():
            tensor.copy_(self._workload.initial(name, seed))
        self._optimizer = self._make_optimizer()

    def state(self) -> Iterator[Piece]:
        """See `Engine.state`. Replicas share the writing: each saves its part of the tensors."""
        tensors = {f"model.{n}": t.detach() for n, t in {**self._parameters, **self._buffers}.items()}
        for name, parameter in self._parameters.items():
            for slot in SLOTS:
                tensors[f"optim.{name}.{slot}"] = self._slots(parameter)[slot]
        tensors["optim.step"] = torch.tensor(self._steps(), dtype=torch.int64)
        for name in _share(tensors, dist.get_rank(), dist.get_world_size()):
            tensor = tensors[name]
            yield Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @torch.no_grad()
    def load(self, reader: Reader) -> None:
        """See `Engine.load`."""
        wanted = {f"model.{n}": tuple(t.shape) for n, t in {**self._parameters, **self._buffers}.items()}
        reader.manifest.require(wanted)
        for name, tensor in {**self._parameters, **self._buffers}.items():
            tensor.copy_(reader.read(f"model.{name}"))
        steps = int(reader.read("optim.step"))
        for name, parameter in self._parameters.items():
            slots = {slot: reader.read(f"optim.{name}.{slot}").to(parameter.device) for slot in SLOTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **slots}
        if self._device.device.type == "cuda":  # the fused kernel keeps its step count on the device
            for state in self._optimizer.state.values():
                state["step"] = state["step"].to(self._device.device)

    def close(self) -> None:
        """See `Engine.close`."""
        self._optimizer.state.clear()

    def _forward(self, batch: Batch, parts: int, sums: dict[str, Tensor]) -> Tensor:
        """Loss of a micro-batch as the backward pass wants it; adds to the sums of the step."""
        batch = {k: v.to(self._device.device, non_blocking=True) for k, v in batch.items()}
        with self._device.autocast():
            loss = self._workload.loss(self.model, batch)
        total = loss.total / self._expected
        share = 1.0 / (parts * self._layout.dp)
        add = {"loss": loss.total.detach(), "count": loss.count.detach()}
        add |= {name: value.detach() * share for name, value in loss.metrics.items()}
        for name, value in add.items():
            sums[name] = sums.get(name, 0.0) + value.double()
        return total if loss.extra is None else total + loss.extra * share

    def _over_ranks(self, sums: dict[str, Tensor]) -> tuple[float, dict[str, float], float]:
        """Mean loss, means of the other metrics, and what corrects the gradients to the true token count."""
        packed = torch.stack(list(sums.values())).to(self._device.device)
        gathered = packed.new_empty(dist.get_world_size() * len(sums))
        dist.all_gather_into_tensor(gathered, packed, group=self._group)
        # Added here in rank order: every rank then has the same bits.
        totals = dict(zip(sums, gathered.view(-1, len(sums)).sum(dim=0).tolist(), strict=True))
        count = max(totals.pop("count"), 1.0)
        return totals.pop("loss") / count, totals, self._expected / count

    def _make_optimizer(self) -> torch.optim.AdamW:
        options = self._spec.train.optimizer
        matrices = [p for p in self._parameters.values() if p.dim() > 1]
        vectors = [p for p in self._parameters.values() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)

    def _slots(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self._optimizer.state.get(parameter)
        return state or {slot: torch.zeros_like(parameter) for slot in SLOTS}

    def _steps(self) -> int:
        return next((int(state["step"]) for state in self._optimizer.state.values()), 0)


def _share(tensors: dict[str, Tensor], rank: int, world: int) -> list[str]:
    """Names that `rank` saves: largest first to whom has least, so that all write about as many bytes."""
    load = [0] * world
    mine = []
    for name in sorted(tensors, key=lambda n: (-tensors[n].numel(), n)):
        writer = load.index(min(load))
        load[writer] += tensors[name].numel() * tensors[name].element_size()
        if writer == rank:
            mine.append(name)
    return mine
