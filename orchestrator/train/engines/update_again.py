"""The update of a rank's shards, computed again by another rank from the same numbers.

Where every replica makes the same update there is nothing to compute again: the replicas compare their results. A shard
of ZeRO is updated by one rank alone, so its weights, gradients and optimizer states go to another rank, a few
parameters at a time, before the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
ALIGNED = 16
"""A tensor in a message begins at a multiple of so many numbers, 64 bytes, as an allocation of its own would."""
Build = Callable[[Sequence[ParameterShard]], torch.optim.Optimizer]
"""Makes the job's optimizer for some shards."""
Fact = tuple[str, Sequence[int]]
"""What the rank that computes a shard again must know of it besides its numbers: its name and its shape."""


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
    ) -> None:
        """Make ready.

        Args:
            shards: what this rank updates.
            cuts: this rank's part of every parameter, which is also that of its replicas.
            spec: the job's optimizer.
            slots: returns the state tensors of a parameter.
            build: makes the optimizer.
            device: where the shards are. A rank may have none.
        """
        self._shards = shards
        self._cuts = cuts
        self._is_recomputed = needs_its_shard_alone(str(spec.name))
        self._slots = slots
        self._build = build
        self._device = device
        self._their_facts: list[list[Fact]] | None = None
        """Names and shapes in the bundles of `giver`, which never change. None until `giver` has sent them."""

    @torch.no_grad()
    def step(
        self, optimizer: torch.optim.Optimizer, lr: float, check: StepCheck, flaw: Flaw | None = None
    ) -> None:
        """Step the optimizer, and let `check` compare the result. Raises what it raises.

        Args:
            optimizer: this rank's optimizer, with gradients complete and clipped.
            lr: the learning rate.
            check: names the ranks that compute for each other, and compares.
            flaw: an injected fault of the arithmetic; None without.
        """
        taker = check.taker
        copies = [s for s in self._shards if taker in s.replica_group.ranks]
        single_owner = [s for s in self._shards if taker not in s.replica_group.ranks]
        recomputed = single_owner if self._is_recomputed and taker is not None else []
        records: list[Record] = []

        def update() -> None:
            optimizer.step()
            _bend([shard.parameter for shard in self._shards], flaw)
            if taker is not None:
                results = (self._results(each, optimizer, check.exact) for each in (copies, recomputed))
                records.extend(_recorded(tensors, check.exact) for tensors in results)

        theirs = self._compute(optimizer, recomputed, lr, check, flaw=flaw, update=update)
        if taker is not None:
            copies_record, own_record = records
            check.update(copies_record, own_record, theirs)

    def _compute(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[ParameterShard],
        lr: float,
        check: StepCheck,
        flaw: Flaw | None,
        update: Callable[[], None],
    ) -> Record:
        """Exchange the numbers of the shards that one rank alone updates, make this rank's own update, and return the
        results for the shards of `giver`.

        Args:
            optimizer: this rank's optimizer.
            shards: those of this rank that `taker` computes again.
            lr: the learning rate.
            check: names `giver` and `taker`.
            flaw: see `step`.
            update: makes this rank's own update, which changes the numbers in place.
        """
        if check.giver is None or check.taker is None or not self._is_recomputed:
            update()
            return []
        bundles = _bundles(shards, self._slots)
        if self._their_facts is None:
            own_facts = [[(shard.name, list(shard.parameter.shape)) for shard in each] for each in bundles]
            self._their_facts = swap_json(own_facts, to=check.taker, of=check.giver)
        their_facts = self._their_facts or []
        count = max(len(bundles), len(their_facts))
        record: Record = []
        for number in range(count):
            sent = self._numbers(bundles[number], optimizer) if number < len(bundles) else None
            facts = their_facts[number] if number < len(their_facts) else []
            received, parts = self._room(facts)
            operations = []
            if sent is not None:
                operations.append(dist.P2POp(dist.isend, sent, check.taker))
            if facts:
                operations.append(dist.P2POp(dist.irecv, received, check.giver))
            pending = dist.batch_isend_irecv(operations)
            if number == count - 1:
                update()  # while the last numbers travel, of which `sent` is a copy
            for work in pending:
                work.wait()
            if facts:
                record += _recorded(self._updated(facts, parts, lr, check.exact, flaw), check.exact)
            del sent, received, parts, pending, operations  # before the next bundle takes as much
        if not count:
            update()
        return record

    def _room(self, facts: Sequence[Fact]) -> tuple[Tensor, list[list[Tensor]]]:
        """Allocate the numbers of shards as one tensor, fp32.

        Returns:
            The tensor, and for each shard the views in it: step count, weights, gradient and states.
        """
        shapes = [[(), *[tuple(shape)] * (2 + len(self._slots(name)))] for name, shape in facts]
        sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for each in shapes for shape in each]
        numbers = torch.empty(sum(sizes), device=self._device)
        rooms = iter(numbers.split(sizes))
        parts = [[next(rooms)[: math.prod(shape)].view(shape) for shape in each] for each in shapes]
        return numbers, parts

    def _numbers(self, bundle: Sequence[ParameterShard], optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the numbers of shards before the update, as `_room` lays them out."""
        numbers, parts = self._room([(shard.name, shard.parameter.shape) for shard in bundle])
        views_to_fill: list[Tensor] = []
        sources: list[Tensor] = []
        for shard, views in zip(bundle, parts, strict=True):
            state = optimizer.state.get(shard.parameter, {})
            states = [state.get(slot.name) for slot in self._slots(shard.name)]
            tensors = [state.get("step"), shard.parameter.detach(), shard.parameter.grad, *states]
            for view, tensor in zip(views, tensors, strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    views_to_fill.append(view)
                    sources.append(tensor)
        torch._foreach_copy_(views_to_fill, sources)
        return numbers

    def _updated(
        self,
        facts: Sequence[Fact],
        parts: Sequence[Sequence[Tensor]],
        lr: float,
        exact: bool,
        flaw: Flaw | None,
    ) -> list[Tensor]:
        """Return the weights and states of another rank's shards after the update, which changes `parts` in place."""
        group_of_one = ProcessGroup((dist.get_rank(),), 0, None)
        shards: list[ParameterShard] = []
        for (name, _), (_, weights, gradient, *_) in zip(facts, parts, strict=True):
            parameter = nn.Parameter(weights)
            parameter.grad = gradient
            shards.append(
                ParameterShard(
                    name, self._cuts[name], parameter, (), group_of_one, counted=False, saved=False
                )
            )
        optimizer = self._build(shards)
        for shard, (step, _, _, *states) in zip(shards, parts, strict=True):
            names = (slot.name for slot in self._slots(shard.name))
            optimizer.state[shard.parameter] = {
                **dict(zip(names, states, strict=True)),
                "step": step_count(float(step), shard, optimizer),
            }
        set_lr(optimizer.param_groups, lr)
        optimizer.step()
        _bend([shard.parameter for shard in shards], flaw)
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


def _bend(parameters: Sequence[nn.Parameter], flaw: Flaw | None) -> None:
    if flaw is not None:
        flaw.bend_updates(parameters)


def _is_own(slot: Slot, shard: ParameterShard, exact: bool) -> bool:
    """Whether a state of a shard is wrong only if this rank computes wrongly.

    Scales of blocks that other ranks hold a part of come from an all-reduce, and codes follow from them. If bits are
    not compared, codes are not either: where a last bit makes another one the nearest they differ by up to 255.
    """
    if slot.is_code and not exact:
        return False
    return not (slot.is_code or slot.is_scale) or not any(part.cut_columns for part in parts_of(shard))


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
