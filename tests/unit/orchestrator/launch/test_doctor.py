"""What the doctor says of a machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import sys
from typing import Any

import pytest

from orchestrator.launch import doctor
from orchestrator.launch.doctor import Finding, Known, examine


def finding(what: str) -> Finding:
    return next(found for found in examine() if found.what == what)


def test_a_machine_that_runs_these_tests_lacks_nothing() -> None:
    found = examine()
    assert [f for f in found if f.verdict == "missing"] == []
    assert {"Python", "torch", "ray", "CPUs", "memory", "GPUs", "process groups", "loopback"} <= {
        f.what for f in found
    }
    assert len({f.what for f in found}) == len(found)
    json.dumps([f.to_json() for f in found])
    assert all(len(f.row()) == 4 for f in found)
    assert all(f.hint for f in found if f.verdict != "ok")


def test_versions_are_told() -> None:
    assert finding("ray").found == importlib.metadata.version("ray")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    assert finding("no-such-package") == Finding(
        "missing", "no-such-package", "not installed", "run make install"
    )


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.13.0+cpu", "ok"), ("2.13.1", "ok"), ("2.14.0", "warning"), ("2.12.9", "warning")],
)
def test_a_version_that_is_not_tested_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str, verdict: str
) -> None:
    monkeypatch.setattr(
        doctor.importlib.metadata, "requires", lambda name: ["torch<2.14,>=2.13", "x; extra=='y'"]
    )
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    found = next(found for found in doctor._packages() if found.what == "torch")
    assert (found.verdict, found.found) == (verdict, version)
    assert found.hint == (
        "" if verdict == "ok" else "this project is tested with torch<2.14,>=2.13: run make install"
    )


def test_bounds_are_those_of_this_project(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"torch", "ray", "transformers"} <= doctor._allowed().keys()
    monkeypatch.setattr(doctor, "PROJECT", "no-such-package")
    assert doctor._allowed() == {}


def test_versions_that_are_known_to_differ_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {"torch": ">=2", "ray": ">=2"}
    here, elsewhere = (
        Known(pairs, "they differ", "take others"),
        Known({**pairs, "ray": "<2"}, "not here", "-"),
    )
    absent = Known({"no-such-package": ">=1"}, "not here", "-")
    monkeypatch.setattr(doctor, "KNOWN", (here, elsewhere, absent))
    warned = [found for found in examine() if found.what.startswith(("torch>", "no-such"))]
    assert warned == [Finding("warning", "torch>=2 with ray>=2", "they differ", "take others")]


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10, 9), "missing"), ((3, 13, 1), "ok"), ((3, 14, 0), "missing")]
)
def test_the_version_of_python(monkeypatch: pytest.MonkeyPatch, version: Any, verdict: str) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    found = next(doctor._python())
    assert (found.verdict, found.found) == (verdict, ".".join(map(str, version)))
    assert bool(found.hint) == (verdict != "ok")


def test_a_small_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 2**15)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**29, 2**28))
    found = {f.what: f for f in doctor._machine()}
    assert (found["memory"].verdict, found["memory"].found) == ("warning", "1.0 GiB")
    assert found["free disk here"].verdict == "warning"
    assert found["shared memory"].verdict == "warning"
    assert all(found[what].hint for what in ("memory", "free disk here", "shared memory"))


def test_a_machine_without_a_compiler_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (found,) = doctor._compiler()
    assert (found.verdict, found.found) == ("warning", "none")
    assert "g++" in found.hint


def test_a_machine_whose_loopback_is_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", type("Refusing", (socket.socket,), {"bind": refuse}))
    (found,) = doctor._loopback()
    assert (found.verdict, found.found) == ("missing", "Cannot assign requested address")
    assert "--address" in found.hint
