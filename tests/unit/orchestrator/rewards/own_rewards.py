"""Own rewards, good and bad."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def size(prompt: str, answer: str, **columns: Any) -> float:
    return len(prompt) + 10 * len(answer) + 100 * len(columns)


def only_label(label: str) -> bool:
    return label == "a"


def reference(answer: str, columns: dict[str, Any]) -> float:
    return float(columns["answer"] == answer)


def drawn(answer: str) -> float:
    return random.random()


def from_set(answer: str) -> float:
    return float(list({"a", "b", "c", "d", answer}).index("a"))


def floods(answer: str) -> float:
    """Prints 32 MiB, half of it by another program."""
    print(f"begin {answer}")
    for _ in range(256):
        os.write(1, b"x" * 2**16)
    subprocess.run(
        [sys.executable, "-c", "import os\nfor _ in range(256): os.write(2, b'y' * 2**16)"], check=True
    )
    return 1.0


def unknown(answer: str, solution: str) -> float:
    return 1.0


def raises(answer: str) -> float:
    raise ValueError(f"cannot read\n{answer}")


def raises_on_odd(answer: str) -> float:
    if int(answer) % 2:
        raise ValueError(answer)
    return 1.0


def leaves(answer: str) -> float:
    sys.exit(0)


def meets_two_others(answer: str, meeting: str) -> float:
    """Waits until two other answers are being scored, too."""
    (Path(meeting) / answer).touch()
    deadline = time.monotonic() + 50.0
    while len(os.listdir(meeting)) < 3:
        if time.monotonic() > deadline:
            raise TimeoutError("no others are being scored")
        time.sleep(0.01)
    return 1.0


def hangs(answer: str) -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
    return 1.0


def hogs(answer: str) -> float:
    return float(len(bytearray(2**31)))


kept: list[bytearray] = []


def keeps(answer: str) -> float:
    kept.append(bytearray(300 << 20))
    return len(kept)


def nan(answer: str) -> float:
    return float("nan")


def infinite(answer: str) -> float:
    return float("-inf")


def nothing(answer: str) -> None:
    return None


def text(answer: str) -> str:
    return "1.0"


def prints(answer: str) -> float:
    print('{"value": 7}')
    os.write(1, b'{"value": 8}\n')
    subprocess.run(["echo", '{"value": 9}'], check=True)
    return 1.0


def reads(answer: str) -> float:
    return float(len(sys.stdin.read()))


def kills_itself(answer: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def ends_itself(answer: str) -> float:
    os._exit(3)


def forks(answer: str) -> float:
    """Both processes return."""
    os.fork()
    return float(answer)


def leaves_a_daemon(answer: str) -> float:
    """A process of another session, whose parent ends."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            for descriptor in range(3):
                os.close(descriptor)
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return 1.0


def daemon_and_hang(answer: str) -> float:
    leaves_a_daemon(answer)
    return hangs(answer)


def once_killed(answer: str, mark: str) -> float:
    """Ended by somebody else the first time."""
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def kills_its_worker(answer: str, mark: str) -> float:
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    return 1.0


not_callable = 3
