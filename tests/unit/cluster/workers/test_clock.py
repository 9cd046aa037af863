from __future__ import annotations

import subprocess
import sys
import time

from cluster.workers.clock import process_age


def test_the_age_of_a_process_is_exact() -> None:
    code = (
        "import time; first = time.time(); from cluster.workers.clock import process_age\n"
        "print(first, time.time(), process_age(), time.time())"
    )
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, earlier, age, later = map(float, done.stdout.split())
    assert earlier - first < age < later - before + 0.02  # the kernel counts hundredths
    assert 0.0 < process_age() < time.time()
