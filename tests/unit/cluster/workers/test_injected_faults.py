"""Faults that are written in one word and strike at one place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from cluster.workers.injected_faults import FaultSpec, InjectedFault, remaining_faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@1:5", FaultSpec("kill", 1, 5)),
        ("stop@0:12", FaultSpec("stop", 0, 12)),
        ("raise@10:1", FaultSpec("raise", 10, 1)),
        ("kill@1:5/3", FaultSpec("kill", 1, 5, attempt=3)),
        ("kill@1:5/*", FaultSpec("kill", 1, 5, attempt=None)),
        ("nan@1:5", FaultSpec("nan", 1, 5)),
        ("slow@1:5", FaultSpec("slow", 1, 5)),
        ("product@1:5/*", FaultSpec("product", 1, 5, attempt=None)),
        ("slow@1:5/2=0.25", FaultSpec("slow", 1, 5, attempt=2, seconds=0.25)),
    ],
)
def test_a_fault_is_read(text: str, fault: FaultSpec) -> None:
    assert FaultSpec.parse(text) == fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "kill@1",
        "kill@:5",
        "kill@1:",
        "kill@a:5",
        "melt@1:5",
        "kill@1:5:6",
        "kill@-1:5",
        "KILL@1:5",
        "kill@1:5=2",
        "slow@1:5=",
        "slow@1:5=-1",
    ],
)
def test_what_is_no_fault_is_refused_with_the_mend(text: str) -> None:
    with pytest.raises(ValueError, match="write KIND@RANK:STEP") as found:
        FaultSpec.parse(text)
    assert "kill, stop, raise, nan, slow" in str(found.value)


def test_a_wrong_rank_does_nothing_by_itself_and_is_wrong_at_its_place_only() -> None:
    fault = FaultSpec("update", 1, 5)
    assert not fault.apply(1, 2, 5, 1)
    assert fault.spoils(1, 2, 5, 1)
    assert not any(fault.spoils(*place) for place in ((0, 2, 5, 1), (1, 2, 4, 1), (1, 2, 6, 1), (1, 2, 5, 2)))
    assert not FaultSpec("slow", 1, 5).spoils(1, 2, 5, 1)


def test_a_fault_strikes_at_its_place_only() -> None:
    fault = FaultSpec("raise", 1, 5)
    for place in ((0, 2, 5, 1), (1, 2, 4, 1), (1, 2, 6, 1), (1, 2, 5, 2)):
        fault.apply(*place)
    with pytest.raises(InjectedFault, match="rank 1, step 5"):
        fault.apply(1, 2, 5, 1)


def test_a_fault_of_any_attempt_strikes_once_and_the_last_rank_where_there_are_fewer() -> None:
    fault = FaultSpec("nan", 1, 5, attempt=None)
    assert fault.apply(1, 2, 5, 7)
    assert fault.apply(0, 1, 5, 8)
    assert not fault.apply(0, 2, 5, 8)
    assert remaining_faults(("nan@1:5/*", "nan@0:6/*", "kill@0:3/2"), 5) == ("nan@0:6/*", "kill@0:3/2")


def test_numbers_are_poisoned_once_and_by_the_rank_itself() -> None:
    fault = FaultSpec("nan", 1, 5)
    assert [fault.apply(1, 2, step, 1) for step in (4, 5, 6)] == [False, True, False]
    assert not fault.apply(1, 2, 5, 2)


def test_a_slow_rank_stays_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    fault = FaultSpec("slow", 1, 5, seconds=0.25)
    for place in ((1, 2, 4, 1), (0, 2, 5, 1), (1, 2, 5, 2), (1, 2, 5, 1), (1, 2, 9, 1)):
        assert not fault.apply(*place)
    assert slept == [0.25, 0.25]


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_fault_befalls_the_whole_process(kind: str, number: int) -> None:
    call = f"FaultSpec.parse('{kind}@0:1').apply(0, 1, 1, 1)"
    code = f"from cluster.workers.injected_faults import FaultSpec; {call}; print('alive')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        found = os.WTERMSIG(status) if kind == "kill" else os.WSTOPSIG(status)
        assert found == number
    finally:
        if kind == "stop":
            process.kill()
            os.waitpid(process.pid, 0)
        process.returncode = -9
        out, _ = process.communicate()
    assert out == b""
