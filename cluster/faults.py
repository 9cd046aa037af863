"""Faults on demand: at an exact rank and step, so that recovery can be tested without sleeping and hoping."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

KINDS = ("kill", "stop", "raise")


class InjectedFault(RuntimeError):
    """Raised by a fault of the kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """`kind` befalls `rank` as it begins `step`, counted from 1, in that attempt only.

    kill ends the process by SIGKILL, stop freezes it by SIGSTOP, raise raises InjectedFault.
    """

    kind: str
    rank: int
    step: int
    attempt: int = 1

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault written as KIND@RANK:STEP or KIND@RANK:STEP/ATTEMPT. Raises ValueError with the mend."""
        found = re.fullmatch(rf"({'|'.join(KINDS)})@(\d+):(\d+)(?:/(\d+))?", text)
        if not found:
            kinds = ", ".join(KINDS)
            raise ValueError(f"write KIND@RANK:STEP or KIND@RANK:STEP/ATTEMPT with KIND one of {kinds}")
        return cls(found[1], int(found[2]), int(found[3]), int(found[4] or 1))

    def strike(self, rank: int, step: int, attempt: int) -> None:
        """Happen, if this is the place."""
        if (rank, step, attempt) != (self.rank, self.step, self.attempt):
            return
        if self.kind == "raise":
            raise InjectedFault(f"injected at rank {rank}, step {step}")
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
