"""Faults on demand: at an exact rank and step, so that recovery can be tested without sleeping and hoping."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

KINDS = ("kill", "stop", "raise", "nan", "slow")
SLOW = 1.0
"""Seconds a step that a slow rank loses unless the fault says otherwise."""


class InjectedFault(RuntimeError):
    """Raised by a fault of the kind `raise`."""


@dataclass(frozen=True)
class FaultSpec:
    """`kind` befalls `rank`, or the last one there is, as it begins `step`, counted from 1, in that attempt only.

    Without an attempt it comes in whichever begins that step first; see `still_to_come`. kill ends the process by
    SIGKILL, stop freezes it by SIGSTOP, raise raises InjectedFault, nan makes the step's numbers NaN, slow makes this
    and every later step of the attempt take `seconds` longer.
    """

    kind: str
    rank: int
    step: int
    attempt: int | None = 1
    seconds: float = SLOW

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """The fault written as KIND@RANK:STEP[/ATTEMPT], and =SECONDS for slow. Raises ValueError with a hint."""
        found = re.fullmatch(rf"({'|'.join(KINDS)})@(\d+):(\d+)(?:/(\d+|\*))?(?:=(\d+(?:\.\d+)?))?", text)
        if not found or (found[5] and found[1] != "slow"):
            kinds = ", ".join(KINDS)
            raise ValueError(
                f"write KIND@RANK:STEP or KIND@RANK:STEP/ATTEMPT with KIND one of {kinds}, and ATTEMPT a number or * "
                "for any; slow may end in =SECONDS"
            )
        attempt = None if found[4] == "*" else int(found[4] or 1)
        return cls(found[1], int(found[2]), int(found[3]), attempt, float(found[5] or SLOW))

    def strike(self, rank: int, world: int, step: int, attempt: int) -> bool:
        """Happen, if this is the place. Whether the rank must poison its numbers, which only it can do."""
        if rank != min(self.rank, world - 1) or self.attempt not in (None, attempt):
            return False
        if self.kind == "slow" and step >= self.step:
            time.sleep(self.seconds)
        if self.kind == "slow" or step != self.step:
            return False
        if self.kind == "nan":
            return True
        if self.kind == "raise":
            raise InjectedFault(f"injected at rank {rank}, step {step}")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # the kernel continues a stopped process whose group is orphaned
            os.kill(os.getpid(), signal.SIGSTOP)


def still_to_come(faults: tuple[str, ...], begun: int) -> tuple[str, ...]:
    """The faults without those of any attempt up to step `begun`, the last that a failed attempt may have begun."""
    parsed = ((text, FaultSpec.parse(text)) for text in faults)
    return tuple(text for text, fault in parsed if fault.attempt is not None or fault.step > begun)
