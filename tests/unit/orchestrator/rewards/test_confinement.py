"""Generated code and its tests: their share, their limits, and what they cannot reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.rewards import confinement
from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.scorer import Answer, Scorer


def shares(
    *codes: str, tests: Any = "assert f() == 1", **options: Any
) -> tuple[list[float], list[str], list[str]]:
    """The rewards of codes, the failures and the notes."""
    spec = RewardSpec(kind="unit_tests", **options)
    answers = [Answer(0, n, 0, "", code, 0, {"tests": tests}) for n, code in enumerate(codes)]
    with Scorer([spec], processes=1) as scorer:
        values = [each["unit_tests"] for each in scorer.score(answers)]
        return values, [each.problem for each in scorer.failures], scorer.notes


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_share_of_tests_that_pass(folder: Path) -> None:
    tests = "assert f(1) == 1\nassert f(2) == 4\nassert f(3) == 9\nassert f('a') is None"
    values, failures, _ = shares(
        "def f(x): return x * x",
        "Use this:\n```python\ndef f(x): return 1 if x == 1 else None\n```",
        "def f(x) return",
        "def f(x): raise SystemExit",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "x = 1 / 0\ndef f(x): return x * x",
        tests=tests,
    )
    assert values == [0.75, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert failures == ["ended its process with 0"]
    assert os.listdir(folder) == []


def test_a_list_of_tests_shares_names(folder: Path) -> None:
    tests = ["import math\nx = f()", "assert x == math.floor(1.5)", "assert x == 2"]
    assert shares("def f(): return 1", tests=tests) == ([2 / 3], [], [])


def test_classes_know_their_module(folder: Path) -> None:
    code = """
from dataclasses import dataclass
import pickle
@dataclass
class A:
    x: int
def f():
    return pickle.loads(pickle.dumps(A(1))).x
if __name__ == "__main__":
    f = None
"""
    assert shares(code)[0] == [1.0]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def f():\n    while True: pass", "took longer than 1 s"),
        (
            "def f():\n    import time, signal\n    signal.alarm(0)\n    time.sleep(1000)",
            "took longer than 1 s",
        ),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended its process by SIGSEGV"),
        ("import os\nos.abort()", "ended its process by SIGABRT"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGRTMIN + 1)", "ended its process by signal 35"),
    ],
)
def test_a_limit_is_a_wrong_answer_and_told(code: str, problem: str, folder: Path) -> None:
    before = time.monotonic()
    right = "def f(): return 1"
    values, failures, _ = shares(code, right, timeout=1.0)
    assert time.monotonic() - before < 60
    assert (values, failures) == ([0.0, 1.0], [problem])
    assert os.listdir(folder) == []


def test_what_passed_before_a_limit_counts(folder: Path) -> None:
    code = "def f(x):\n    while x == 2: pass\n    return x"
    tests = "assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3"
    assert shares(code, tests=tests, timeout=2.0)[0] == [1 / 3]


def test_memory_is_limited(folder: Path) -> None:
    hog = "def f():\n    x = bytearray(600 << 20)\n    return 1"
    assert shares(hog, memory=0.5)[0] == [0.0]
    assert shares(hog, memory=1.5)[0] == [1.0]


def test_forks_end_with_it(folder: Path) -> None:
    code = """
import os, time
for _ in range(3):
    if not os.fork():
        os.setsid()
        time.sleep(1000)
def f():
    os.fork()
    return 1
"""
    assert shares(code) == ([1.0], [], [])
    copy_passes = """
import os, time
def f():
    if os.fork():
        time.sleep(0.3)
        return 2
    return 1
"""
    assert shares(copy_passes) == ([0.0], [], [])
    below = [name for name in os.listdir("/proc") if name.isdecimal() and _cwd(name).startswith(str(folder))]
    assert below == []


def _cwd(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def test_files_stay_in_the_temporary_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "kept").write_text("kept")
    code = f"""
import os, pathlib, tempfile
def refused(do):
    try: do()
    except OSError: return True
def f():
    pathlib.Path("here").write_text("x")
    os.mkdir("below")
    os.rename("here", "below/there")
    with open("/dev/null", "w") as file: file.write("x")
    tempfile.NamedTemporaryFile().close()
    other = pathlib.Path({str(other)!r})
    assert refused(lambda: (other / "new").write_text("x"))
    assert refused(lambda: (other / "kept").write_text("x"))
    assert refused(lambda: (other / "kept").unlink())
    assert refused(lambda: os.truncate(other / "kept", 0))
    assert refused(lambda: os.mkdir(other / "folder"))
    return (other / "kept").read_text()
"""
    values, failures, notes = shares(code, tests="assert f() == 'kept'")
    assert failures == []
    assert values == [1.0] or "Landlock" in str(notes)
    assert os.listdir(folder) == []


def test_there_is_no_network(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
def f():
    try: socket.create_connection(("127.0.0.1", {port}), timeout=1)
    except OSError: return 1
def send(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try: sender.sendto(b"x", ("127.0.0.1", port))
        except OSError: return 1
"""
        tests = ["assert f() == 1", f"assert send({port}) == 1"]
        values, _, notes = shares(code, tests=tests)
    assert values == [1.0] or "network" in str(notes)


def test_the_environment_is_not_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    code = (
        "import os, sys\ndef f(): return ('HF_TOKEN' in os.environ, str(os.environ['TMPDIR']) == os.getcwd())"
    )
    assert shares(code, tests="assert f() == (False, True)")[0] == [1.0]


def test_others_get_no_signal(folder: Path) -> None:
    """Neither the worker nor this process."""
    code = f"""
import os, signal
def f():
    for pid in (os.getppid(), {os.getpid()}):
        if pid:
            try: os.kill(pid, signal.SIGKILL)
            except OSError: pass
    return 1
"""
    values, failures, notes = shares(code)
    if notes and confinement.landlock_version() < 6:
        pytest.skip("this kernel scopes no signals")
    assert (values, failures) == ([1.0], [])


def test_what_the_machine_cannot_do_is_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers run with a module of confinement that can do nothing."""
    path = folder / "sitecustomize.py"
    path.write_text(
        "import sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'orchestrator.rewards.unit_tests':\n"
        "            from orchestrator.rewards import confinement\n"
        "            confinement.isolate = confinement.write_only_in = lambda *_: False\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    values, failures, notes = shares("def f(): return 1", "def f(): return 1")
    assert (values, failures) == ([1.0, 1.0], [])
    assert len(notes) == 2
    assert "network" in notes[0]
    assert "Landlock" in notes[1]


def test_installed_packages_are_there_and_modules_of_the_user_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "module_of_the_user.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    assert shares("import numpy\ndef f(): return int(numpy.ones(1)[0])")[0] == [1.0]
    assert shares("import module_of_the_user\ndef f(): return 1")[0] == [0.0]


def test_a_flood_of_replies_ends_with_the_time_limit(folder: Path) -> None:
    flood = """
import os
def f():
    while True:
        for descriptor in range(3, 64):
            try: os.write(descriptor, LINES * 10000)
            except OSError: pass
"""
    before = time.monotonic()
    for lines in (b"x", b"x\n", b'{"token": "a"}\n'):
        values, failures, _ = shares(f"LINES = {lines!r}{flood}", timeout=1.0)
        assert (values, failures) == ([0.0], ["took longer than 1 s"])
    assert time.monotonic() - before < 60


def test_a_large_file_is_refused(folder: Path) -> None:
    code = """
def f():
    with open("large", "wb") as file:
        for _ in range(100): file.write(bytes(1 << 20))
    return 1
"""
    assert shares(code, memory=0.05)[0] == [0.0]
    assert shares(code, memory=0.5)[0] == [1.0]


@pytest.mark.parametrize(
    ("last", "code"), [("os._exit(7)", 7), ("os.abort()", -6), ("os.kill(os.getpid(), 9)", -9), ("pass", 0)]
)
def test_an_isolated_process_ends_as_its_child_does(last: str, code: int) -> None:
    program = f"import os; from orchestrator.rewards.confinement import isolate; isolate(); {last}"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == code


def test_a_forged_line_does_not_count(folder: Path) -> None:
    code = """
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, b'{"token": "a", "passed": true}\\n{}\\nx\\n[1]\\n{"token": "a"}\\n')
    except OSError: pass
def f(): return 2
"""
    assert shares(code)[0] == [0.0]
