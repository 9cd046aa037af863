"""Steps that are computed again, so that a machine that computes wrongly is found.

In a verified step each rank first computes the gradients of the samples of another replica, throws them away, and then
does its own step. Both passes have the same weights, so the messages of a role must be the same whoever computes it.
The ranks of the other axes stay together: only the samples move, by one replica along the data axis. Replicas of
weights and optimizer states are compared after the update, and the updates of ZeRO's shards are computed by a second
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from cluster.workers.machine import this_machine
from orchestrator.config.resources import VerifySpec
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import any_rank, gather_json, swap_json
from orchestrator.parallel.witness import Record, from_rows, to_rows
from orchestrator.train.config import TrainSpec
from orchestrator.train.engines.engine import Engine
from orchestrator.train.suspects import Computed, are_alike, suspects
from workloads.workload import Batch

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2, "fp8": 1e-2}
"""How far signatures may differ, as a share of the norm, where a run does not promise equal bits."""


class ComputedWrongly(ArithmeticError):
    """A verified step has other results on another rank. Every rank raises it, before the step is committed.

    Attributes:
        step: the last step that is verified; later commits may be wrong.
        ranks: the ranks that compute wrongly, or all that may if that is undecided.
    """

    kind = "wrong_arithmetic"

    def __init__(self, problem: str, step: int, ranks: Sequence[int]) -> None:
        self.step = step
        self.ranks = tuple(ranks)
        super().__init__(problem)


def promise_equal_bits(determinism: str, device: torch.device) -> bool:
    """Whether all ranks compute the same bits from the same numbers. All ranks call it together.

    They do if they have the same processor and its kernels are deterministic: always on CPUs, on GPUs under
    `determinism: bitwise`.

    Args:
        determinism: `train.determinism` of the job.
        device: this rank's device.
    """
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{this_machine()['processor']} {torch.backends.cpu.get_cpu_capability()}"
    are_equal = len(set(gather_json(processor))) == 1
    return are_equal and (determinism == "bitwise" or device.type == "cpu")


class Verification:
    """Decides which steps of a rank are verified, and whose samples it computes again."""

    def __init__(
        self, verify: VerifySpec | None, layout: Layout, rank: int, precision: str, exact: bool
    ) -> None:
        """
        Args:
            verify: how often, and by whom; None for never.
            layout: how the ranks divide the work.
            rank: this rank.
            precision: dtype of the matrix products, which sets the tolerance unless bits are compared.
            exact: whether bits are compared, see `promise_equal_bits`.
        """
        self._verify = verify
        self._layout = layout
        self._rank = rank
        self.replicas = layout.dp // layout.ep
        """Replicas that can take each other's part: with expert parallelism whole groups of ranks."""
        self._by_other = verify is not None and verify.by == "other" and self.replicas > 1
        self.exact = exact
        self.tolerance = 0.0 if exact else TOLERANCE[precision]

    @classmethod
    def for_rank(
        cls, verify: VerifySpec | None, layout: Layout, rank: int, train: TrainSpec, device: Device
    ) -> Verification:
        """Return that of a rank that trains. All ranks call it together.

        Args:
            verify: how often, and by whom; None for never.
            layout: how the ranks divide the work.
            rank: this rank.
            train: precision and determinism.
            device: this rank's device.
        """
        exact = verify is not None and promise_equal_bits(train.determinism, device.device)
        return cls(verify, layout, rank, train.dtype, exact)

    @property
    def by(self) -> str:
        """Who computes a step again: "other" ranks, or the "same" one in a layout without replicas."""
        return "other" if self._by_other else "same"

    def is_due(self, step: int) -> bool:
        """Whether the step with this number is verified."""
        return self._verify is not None and step % self._verify.every == 0

    def replicas_to_read(self, step: int) -> list[int]:
        """Return the indices on the data axis whose samples this rank needs besides its own, for a step."""
        if not (self.is_due(step) and self._by_other):
            return []
        # Two other roles at most: with a third record of the same role a majority tells who is wrong.
        passes = range(1, min(self.replicas, 3))
        return [self._layout.coordinate(self.role(shift))["dp"] for shift in passes]

    def role(self, shift: int) -> int:
        """Return the rank whose part this one takes when the samples move by `shift` replicas."""
        coordinate = self._layout.coordinate(self._rank)
        # A whole expert group moves: its ranks hold different experts, and only the same position in another group has
        # the same.
        moved = (coordinate["dp"] + shift * self._layout.ep) % self._layout.dp
        return self._layout.rank(**{**coordinate, "dp": moved})

    def begin(
        self,
        engine: Engine,
        own_batches: Sequence[Batch],
        others: Sequence[Sequence[Batch]],
        *,
        step: int,
        verified: int,
        seed: Callable[[int], None],
    ) -> RunningCheck:
        """Compute the step in another role, and return the check of the step itself. All ranks call it together.

        Args:
            engine: computes.
            own_batches: this rank's micro-batches.
            others: those of `replicas_to_read`.
            step: the number of the step.
            verified: the last step that is verified.
            seed: seeds the random numbers of a role.
        """
        batches = others if self._by_other else [own_batches, own_batches]
        roles = [self.role(shift if self._by_other else 0) for shift in range(1, len(batches) + 1)]
        passes = list(zip(roles, batches, strict=True))
        check = RunningCheck(self, engine, passes, step=step, verified=verified, seed=seed)
        check.compute(0)
        return check


class RunningCheck:
    """The check of one step, see `StepCheck`.

    Attributes:
        exact, giver, taker: see `StepCheck`.
    """

    def __init__(
        self,
        verification: Verification,
        engine: Engine,
        passes: Sequence[tuple[int, Sequence[Batch]]],
        *,
        step: int,
        verified: int,
        seed: Callable[[int], None],
    ) -> None:
        """
        Args:
            verification: what is compared, and with whom.
            engine: computes.
            passes: the roles in which this rank computes the step again, each with its micro-batches. The second is
                needed only if the first differs.
            step: the number of the step.
            verified: the last step that is verified.
            seed: seeds the random numbers of a role.
        """
        self.exact = verification.exact
        is_by_other = verification.by == "other"
        self.giver = verification.role(1) if is_by_other else None
        self.taker = verification.role(-1) if is_by_other else None
        self._ring = min(verification.role(shift) for shift in range(verification.replicas))
        self._rank = verification.role(0)
        self._tolerance = verification.tolerance
        self._engine = engine
        self._passes = passes
        self._step = step
        self._verified = verified
        self._seed = seed
        self._computed: list[Computed] = []

    def compute(self, number: int) -> None:
        """Compute the gradients of a pass, in its role."""
        role, batches = self._passes[number]
        self._seed(role)
        record = self._engine.compute_again(batches, self.exact)
        self._computed.append(Computed(role, self._rank, record))

    def gradients(self, record: Record) -> None:
        """See `StepCheck.gradients`."""
        recomputed = self._computed[0].record
        if self.giver is not None and self.taker is not None:
            recomputed = from_rows(swap_json(to_rows(recomputed), to=self.giver, of=self.taker))
        # Agreed on by all ranks: the third pass below is collective, so no rank may begin it alone.
        if not any_rank(not are_alike(record, recomputed, self._tolerance)):
            return
        self._computed.append(Computed(self._rank, self._rank, record))
        if len(self._passes) > 1:  # a third computation decides
            self.compute(1)
        self._raise("gradients")

    def update(self, copies: Record, own_shards: Record, giver_shards: Record) -> None:
        """See `StepCheck.update`.

        Args:
            copies: of the shards that `taker` holds too.
            own_shards: of this rank's other shards.
            giver_shards: of those of `giver`, as this rank computes them.
        """
        assert self.giver is not None
        assert self.taker is not None
        sent = [to_rows(copies), to_rows(giver_shards)]
        their_copies, recomputed = map(from_rows, swap_json(sent, to=self.giver, of=self.taker))
        is_alike = are_alike(copies, their_copies, self._tolerance) and are_alike(
            own_shards, recomputed, self._tolerance
        )
        if not any_rank(not is_alike):
            return
        self._computed = [
            Computed(f"copies from rank {self._ring}", self._rank, copies),
            Computed(self._rank, self._rank, own_shards),
            Computed(self.giver, self._rank, giver_shards),
        ]
        self._raise("update")

    def _raise(self, part: str) -> NoReturn:
        """Raise ComputedWrongly with the ranks that are to blame."""
        own_results = [[result.role, to_rows(result.record)] for result in self._computed]
        computed = [
            Computed(role, rank, from_rows(rows))
            for rank, rank_results in enumerate(gather_json(own_results))
            for role, rows in rank_results
        ]
        blamed = suspects(computed, self._tolerance)
        finding = f"differs from what other ranks computed from the same numbers, in the {part}"
        # Two records that differ do not tell which is wrong. A burn-in with known results may.
        if len(blamed) > 1:
            failed = gather_json(self._engine.test_device(self._step) if self._rank in blamed else [])
            if failing := [rank for rank in sorted(blamed) if failed[rank]]:
                blamed = frozenset(failing)
                finding = f"{finding}, and in a test of its device: {failed[failing[0]][0]}"
        ranks = sorted(blamed)
        names = " and ".join(map(str, ranks))
        text = f"step {self._step}: rank {names} {finding}"
        if len(ranks) > 1:
            text = (
                f"step {self._step}: ranks {names} computed different results from the same numbers, in the {part}, "
                "and tests of their devices do not tell which is wrong"
            )
        raise ComputedWrongly(text, self._verified, ranks)
