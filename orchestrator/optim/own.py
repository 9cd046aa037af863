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
TAKEN = ("step", "average")


def make_own(named: ObjectReference) -> Any:
    """Return the optimizer that a job names. Raises InputError."""
    try:
        found = call(named.use, load(named.use), named.options)
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None
    slots = getattr(found, "slots", None)
    if not callable(getattr(found, "update", None)) or not isinstance(slots, list | tuple):
        raise InputError(f"{named} has no slots and update", WHERE, "see workloads.own.protocols.Optimizer")
    if wrong := [
        name for name in slots if not isinstance(name, str) or not name.isidentifier() or name in TAKEN
    ]:
        raise InputError(
            f"slot {wrong[0]!r} of {named} must be an identifier other than {' and '.join(TAKEN)}",
            WHERE,
            "rename the slot",
        )
    return found


def slots_of_own(named: ObjectReference) -> tuple[str, ...]:
    """Return the names of a parameter's states. Raises InputError."""
    return tuple(make_own(named).slots)


class OwnOptimizer(torch.optim.Optimizer):
    """Calls the user's update for each shard."""

    step_count_on_host = True
    """`step` reads the step count as a Python number. On a GPU tensor this would be a synchronisation."""

    def __init__(self, groups: list[dict[str, Any]], named: ObjectReference, lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self._own = make_own(named)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for slot in self._own.slots:
                    state.setdefault(slot, torch.zeros_like(p))
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                states = {slot: state[slot] for slot in self._own.slots}
                more = {"lr": group["lr"], "weight_decay": group["weight_decay"], "step": int(state["step"])}
                self._own.update(p, p.grad, states, **more)


def check_own(named: ObjectReference) -> None:
    """Raise InputError if the update of a part differs from that part of the update, or if an update fails."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(4, 6, generator=generator), torch.randn(3, 4, 6, generator=generator)
    try:
        whole = _updated(named, start, list(gradients))
        parts = [_updated(named, start.flatten()[cut], [g.flatten()[cut] for g in gradients]) for cut in (
            slice(0, 7), slice(7, 24))]  # fmt: skip
    except Exception as error:  # whatever the user's code raises
        if isinstance(error, InputError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"the update of {named} failed ({reason})", WHERE, "fix it") from None
    if not torch.equal(whole.flatten(), torch.cat(parts)):
        problem = f"{named} updates a part of a parameter differently from the whole, so results depend on the layout"
        raise InputError(problem, WHERE, "change each number by itself")
    if torch.equal(whole, start):
        raise InputError(f"{named} changes nothing", WHERE, "change the parameter in place")


def _updated(named: ObjectReference, start: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    groups = [{"params": [parameter], "lr": 0.1, "lr_scale": 1.0, "weight_decay": 0.1}]
    made = OwnOptimizer(groups, named, 0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        made.step()
    return parameter.detach()
