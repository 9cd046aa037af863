"""The user's own optimizer over shards, see `workloads.own.protocols.Optimizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from workloads.errors import WorkloadError
from workloads.own.object_reference import call, load

WHERE = "train.optimizer.name"
RESERVED_SLOTS = ("step", "average")


def make_own(reference: ObjectReference) -> Any:
    """Return the optimizer that a job names. Raises InputError."""
    try:
        optimizer = call(reference.use, load(reference.use), reference.options)
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None
    slots = getattr(optimizer, "slots", None)
    if not callable(getattr(optimizer, "update", None)) or not isinstance(slots, list | tuple):
        raise InputError(
            f"{reference} has no slots and update", WHERE, "see workloads.own.protocols.Optimizer"
        )
    if wrong := [
        name
        for name in slots
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED_SLOTS
    ]:
        raise InputError(
            f"slot {wrong[0]!r} of {reference} must be an identifier other than {' and '.join(RESERVED_SLOTS)}",
            WHERE,
            "rename the slot",
        )
    return optimizer


def slots_of_own(reference: ObjectReference) -> tuple[str, ...]:
    """Return the names of the state tensors of a parameter. Raises InputError."""
    return tuple(make_own(reference).slots)


class OwnOptimizer(torch.optim.Optimizer):
    """Calls the user's update for each shard."""

    step_count_on_host = True
    """`step` reads the step count as a Python number. On a GPU tensor this would be a synchronisation."""

    def __init__(self, groups: list[dict[str, Any]], reference: ObjectReference, lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self._optimizer = make_own(reference)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for slot in self._optimizer.slots:
                    state.setdefault(slot, torch.zeros_like(p))
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                states = {slot: state[slot] for slot in self._optimizer.slots}
                settings = {
                    "lr": group["lr"],
                    "weight_decay": group["weight_decay"],
                    "step": int(state["step"]),
                }
                self._optimizer.update(p, p.grad, states, **settings)


def check_own(reference: ObjectReference) -> None:
    """Raise InputError if the update of a part differs from that part of the update, or if an update fails."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator)
    gradients = torch.randn(3, 4, 6, generator=generator)
    try:
        full_update = _updated(reference, start, list(gradients))
        part_updates = [_updated(reference, start.flatten()[part], [g.flatten()[part] for g in gradients]) for part in (
            slice(0, 7), slice(7, 24))]  # fmt: skip
    except Exception as error:  # whatever the user's code raises
        if isinstance(error, InputError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"the update of {reference} failed ({reason})", WHERE, "fix it") from None
    if not torch.equal(full_update.flatten(), torch.cat(part_updates)):
        problem = f"{reference} updates a part of a parameter differently from the whole parameter"
        hint = "compute each element from its own gradient and state, so that results do not depend on the layout"
        raise InputError(problem, WHERE, hint)
    if torch.equal(full_update, start):
        raise InputError(f"{reference} changes nothing", WHERE, "change the parameter in place")


def _updated(
    reference: ObjectReference, start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    groups = [{"params": [parameter], "lr": 0.1, "lr_scale": 1.0, "weight_decay": 0.1}]
    optimizer = OwnOptimizer(groups, reference, 0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()
