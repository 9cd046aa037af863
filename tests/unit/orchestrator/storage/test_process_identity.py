"""Whether a process that wrote a file still runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orchestrator.storage.process_identity import has_ended, lineage, process_identity


def test_a_process_lives_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = process_identity(process.pid)
        assert has_ended(identity) is False
        assert has_ended({**identity, "born": "1"}) is True, "another process has its number now"
        process.kill()
    assert has_ended(identity) is True


def test_nothing_is_known_of_a_process_of_another_machine_or_container() -> None:
    own = process_identity(os.getpid())
    assert has_ended({**own, "boot": "of another machine"}) is None
    assert has_ended({**own, "space": "pid:[1]"}) is None


def test_a_process_that_another_user_hides_is_not_taken_for_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry in /proc cannot be read under the mount option hidepid, and a signal is refused."""

    def refuse(*_: int) -> None:
        raise PermissionError

    gone = {**process_identity(2**22 + 1), "born": "7"}
    assert has_ended(gone) is True
    monkeypatch.setattr(os, "kill", refuse)
    assert has_ended(gone) is None


def test_the_lineage_of_a_process_is_itself_and_its_ancestors() -> None:
    own, parent, *_ = lineage()
    assert (own["pid"], parent["pid"]) == (os.getpid(), os.getppid())
    assert len(lineage(1)) == 1
    assert all(has_ended(each) is False for each in lineage(9))
