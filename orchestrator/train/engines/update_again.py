"""The update of a rank's shards, computed again by another rank from the same numbers.

Where every replica makes the same update there is nothing to compute again: the replicas compare their results. A shard
of ZeRO is updated by one rank alone, so its weights, gradients and optimizer states go to another rank, a few
parameters at a time, before the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.optim.blocks import parts_of
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import set_lr
from orchestrator.optim.kinds import Slot, needs_its_shard_alone
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.rank_messages import swap_json
from orchestrator.parallel.witness import Record, Witness
from orchestrator.train.engines.engine import StepCheck
from orchestrator.train.engines.flaw import Flaw
from orchestrator.train.engines.state import step_count

MAX_BYTES_AT_ONCE = 2**26
"""Bytes of weights, gradients and states that are sent to another rank together."""
Build = Callable[[Sequence[ParameterShard]], torch.optim.Optimizer]
"""Makes the job's optimizer for some shards."""


class UpdateAgain:
    """Steps an optimizer and compares the result, see `StepCheck.update`."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        cuts: dict[str, Cut],
        *,
        spec: OptimizerSpec,
        slots: Callable[[str], Sequence[Slot]],
        build: Build,
        device: torch.device,
        flaw: Flaw | None,
    ) -> None:
        """Make ready.

        Args:
            shards: what this rank updates.
            cuts: this rank's part of every parameter, which is also that of its replicas.
            spec: the job's optimizer.
            slots: returns the state tensors of a parameter.
            build: makes the optimizer.
            device: where the shards are. A rank may have none.
            flaw: an injected fault of the arithmetic; None without.
        """
        self._shards = shards
        self._cuts = cuts
        self._is_recomputed = needs_its_shard_alone(str(spec.name))
        self._slots = slots
        self._build = build
        self._device = device
        self._flaw = flaw

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, lr: float, check: StepCheck) -> None:
        """Step the optimizer, and let `check` compare the result. Raises what it raises.

        Args:
            optimizer: this rank's optimizer, with gradients complete and clipped.
            lr: the learning rate.
            check: names the ranks that compute for each other, and compares.
        """
        taker = check.taker
        copies = [s for s in self._shards if taker in s.replica_group.ranks]
        single_owner = [s for s in self._shards if taker not in s.replica_group.ranks]
        # Before this rank's own update, which changes the numbers in place.
        others_record = self._compute(optimizer, single_owner, lr, check)
        optimizer.step()
        self._bend([shard.parameter for shard in self._shards])
        if taker is not None:
            recomputed = single_owner if self._is_recomputed else []
            states = [self._results(bundle, optimizer, check.exact) for bundle in (copies, recomputed)]
            copies_record, own_record = (_recorded(tensors, check.exact) for tensors in states)
            check.update(copies_record, own_record, others_record)

    def _compute(
        self,
        optimizer: torch.optim.Optimizer,
        single_owner: Sequence[ParameterShard],
        lr: float,
        check: StepCheck,
    ) -> Record:
        """Exchange the numbers of the shards that one rank alone updates; return the results for those of `giver`."""
        if check.giver is None or check.taker is None or not self._is_recomputed:
            return []
        own_bundles = _bundles(single_owner, self._slots)
        facts = [[_fact(shard, optimizer) for shard in bundle] for bundle in own_bundles]
        their_facts = swap_json(facts, to=check.taker, of=check.giver)
        witness = Witness()
        witness.begin(check.exact)
        for number in range(max(len(own_bundles), len(their_facts))):
            sent = self._numbers(own_bundles[number], optimizer) if number < len(own_bundles) else None
            facts_received = their_facts[number] if number < len(their_facts) else []
            numbers = self._exchanged(sent, facts_received, check)
            if numbers is not None:
                for tensor in self._updated(facts_received, numbers, lr, check.exact):
                    witness.sent(tensor)
        return witness.take()

    def _numbers(self, bundle: Sequence[ParameterShard], optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the weights, gradients and states of shards before the update, one after the other, fp32."""
        parts: list[Tensor] = []
        for shard in bundle:
            gradient = shard.parameter.grad
            state = optimizer.state.get(shard.parameter, {})
            zeros = torch.zeros_like(shard.parameter)
            parts += [shard.parameter.detach(), zeros if gradient is None else gradient]
            parts += [state.get(slot.name, zeros) for slot in self._slots(shard.name)]
        return torch.cat([part.reshape(-1) for part in parts])

    def _exchanged(self, sent: Tensor | None, facts: Sequence[Any], check: StepCheck) -> Tensor | None:
        """Send a bundle's numbers to `taker`, and return those of a bundle of `giver`."""
        operations = []
        numbers = None
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent, check.taker))
        if facts:
            count = sum((2 + len(self._slots(fact["name"]))) * math.prod(fact["shape"]) for fact in facts)
            # For each shard its weights, gradient and states, in the order of `_numbers`.
            numbers = torch.empty(count, device=self._device)
            operations.append(dist.P2POp(dist.irecv, numbers, check.giver))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return numbers

    def _updated(self, facts: Sequence[Any], numbers: Tensor, lr: float, exact: bool) -> list[Tensor]:
        """Return the weights and states of another rank's shards after the update."""
        group_of_one = ProcessGroup((dist.get_rank(),), 0, None)
        shards: list[ParameterShard] = []
        states: list[dict[str, Tensor]] = []
        first = 0
        for fact in facts:
            name = fact["name"]
            shape = fact["shape"]
            slots = self._slots(fact["name"])
            size = math.prod(shape)
            # Copies, because a part does not begin where an allocation would.
            parts = [
                numbers[first + number * size : first + (number + 1) * size].clone().view(shape)
                for number in range(2 + len(slots))
            ]
            first += (2 + len(slots)) * size
            parameter = nn.Parameter(parts[0])
            parameter.grad = parts[1]
            shards.append(
                ParameterShard(
                    name, self._cuts[name], parameter, (), group_of_one, counted=False, saved=False
                )
            )
            states.append(dict(zip((slot.name for slot in slots), parts[2:], strict=True)))
        optimizer = self._build(shards)
        for fact, shard, state in zip(facts, shards, states, strict=True):
            age = step_count(fact["age"], shard, optimizer)
            optimizer.state[shard.parameter] = {**state, "step": age}
        set_lr(optimizer.param_groups, lr)
        optimizer.step()
        self._bend([shard.parameter for shard in shards])
        return self._results(shards, optimizer, exact)

    def _results(
        self, shards: Sequence[ParameterShard], optimizer: torch.optim.Optimizer, exact: bool
    ) -> list[Tensor]:
        """Return the weights of shards, and their states that follow from this rank's numbers alone."""
        result: list[Tensor] = []
        for shard in shards:
            state = optimizer.state.get(shard.parameter, {})
            slots = [slot for slot in self._slots(shard.name) if slot.name in state]
            result += [shard.parameter, *(state[s.name] for s in slots if _is_own(s, shard, exact))]
        return result

    def _bend(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._flaw is not None:
            self._flaw.bend_updates(parameters)


def _is_own(slot: Slot, shard: ParameterShard, exact: bool) -> bool:
    """Whether a state of a shard is wrong only if this rank computes wrongly.

    Scales of blocks that other ranks hold a part of come from an all-reduce, and codes follow from them. If bits are
    not compared, codes are not either: where a last bit makes another one the nearest they differ by up to 255.
    """
    if slot.is_code and not exact:
        return False
    return not (slot.is_code or slot.is_scale) or not any(part.cut_columns for part in parts_of(shard))


def _fact(shard: ParameterShard, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the rank that computes a shard again must know of it besides its numbers."""
    age = float(optimizer.state.get(shard.parameter, {}).get("step", 0.0))
    return {"name": shard.name, "shape": list(shard.parameter.shape), "age": age}


def _bundles(
    shards: Sequence[ParameterShard], slots: Callable[[str], Sequence[Slot]]
) -> list[list[ParameterShard]]:
    """Return the shards in bundles of up to MAX_BYTES_AT_ONCE bytes of numbers, or of one shard that is larger."""
    result: list[list[ParameterShard]] = []
    size = 0
    for shard in shards:
        shard_bytes = 4 * (2 + len(slots(shard.name))) * shard.parameter.numel()
        if not result or size + shard_bytes > MAX_BYTES_AT_ONCE:
            result.append([])
            size = 0
        result[-1].append(shard)
        size += shard_bytes
    return result


def _recorded(tensors: Sequence[Tensor], exact: bool) -> Record:
    witness = Witness()
    witness.begin(exact)
    for tensor in tensors:
        witness.sent(tensor)
    return witness.take()
