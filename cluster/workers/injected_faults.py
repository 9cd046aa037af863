"""Inject faults at an exact rank and step, so that tests of recovery are deterministic."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

WRONG = ("product", "gradient", "update")
"""Kinds of faults after which a rank computes wrongly, without an error."""
KINDS = ("kill", "stop", "raise", "nan", "slow", *WRONG)
SLOW = 1.0
"""Seconds that a slow rank loses in each step, unless the fault says otherwise."""


class InjectedFault(RuntimeError):
    """Raised by a fault of the kind `raise`."""


@dataclass(frozen=True)
class FaultSpec:
    """A fault of one rank at the begin of a step, or during the evaluation after it."""

    kind: str
    """
    - kill: end the process by SIGKILL.
    - stop: freeze the process by SIGSTOP.
    - raise: raise InjectedFault.
    - nan: make the numbers of the step NaN.
    - slow: make this and every later step of the attempt take `seconds` longer.
    - product, gradient, update: flip a bit of a product, of a gradient or of updated weights in this and every later
      step of the attempt.
    """
    rank: int
    """The rank; the last rank if the gang is smaller."""
    step: int
    """The step, counted from 1."""
    attempt: int | None = 1
    """The attempt. None means the attempt that begins the step first, see `remaining_faults`."""
    seconds: float = SLOW
    in_evaluation: bool = False
    """Whether the fault happens in the middle of the evaluation after the step."""

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Parse KIND@RANK:STEP[e][/ATTEMPT], with =SECONDS for slow. Raises ValueError with a hint."""
        match = re.fullmatch(rf"({'|'.join(KINDS)})@(\d+):(\d+)(e)?(?:/(\d+|\*))?(?:=(\d+(?:\.\d+)?))?", text)
        if not match or (match[6] and match[1] != "slow"):
            kinds = ", ".join(KINDS)
            raise ValueError(
                f"write KIND@RANK:STEP or KIND@RANK:STEP/ATTEMPT with KIND one of {kinds}, and ATTEMPT a number or * "
                "for any; an e after STEP is for the evaluation after it; slow may end in =SECONDS"
            )
        attempt = None if match[5] == "*" else int(match[5] or 1)
        return cls(
            kind=match[1],
            rank=int(match[2]),
            step=int(match[3]),
            attempt=attempt,
            seconds=float(match[6] or SLOW),
            in_evaluation=bool(match[4]),
        )

    def apply(self, rank: int, world: int, step: int, attempt: int, in_evaluation: bool = False) -> bool:
        """Inject the fault if it is due. Return whether the rank must make its own numbers NaN.

        Args:
            rank: that asks.
            world: number of ranks.
            step: that the rank begins, from 1.
            attempt: of the run, from 1.
            in_evaluation: whether it is in the evaluation after the step.

        Raises:
            InjectedFault: the fault is of kind `raise`.
        """
        if self.in_evaluation != in_evaluation:
            return False
        if rank != min(self.rank, world - 1) or self.attempt not in (None, attempt):
            return False
        if self.kind == "slow" and step >= self.step:
            time.sleep(self.seconds)
        if self.kind in ("slow", *WRONG) or step != self.step:
            return False
        if self.kind == "nan":
            return True
        if self.kind == "raise":
            raise InjectedFault(f"injected at rank {rank}, step {step}")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # the kernel continues a stopped process whose group is orphaned
            os.kill(os.getpid(), signal.SIGSTOP)

    def spoils(self, rank: int, world: int, step: int, attempt: int) -> bool:
        """Whether the rank computes wrongly from this step on.

        Args:
            rank: that asks.
            world: number of ranks.
            step: that the rank begins, from 1.
            attempt: of the run, from 1.
        """
        is_there = rank == min(self.rank, world - 1) and self.attempt in (None, attempt)
        return self.kind in WRONG and is_there and step == self.step


def remaining_faults(faults: tuple[str, ...], begun: int) -> tuple[str, ...]:
    """Return the faults for the next attempt. Faults for any attempt are dropped up to step `begun`.

    Args:
        faults: the faults as text.
        begun: the last step that the failed attempt may have started.
    """
    parsed = ((text, FaultSpec.parse(text)) for text in faults)
    return tuple(text for text, fault in parsed if fault.attempt is not None or fault.step > begun)
