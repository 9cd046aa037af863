"""Fits the shares of device profiles to published steps (tests/published_steps.py), and prints each row's error.

Gauss-Newton on logarithms with a weak prior; the errors that are left out are of the linearised fit without the row.
Run it with `python tests/bench/fit_profiles.py`, and write what it finds into orchestrator/planner/profiles.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paths  # noqa: F401
from fsdp_steps import FITTED, HELD_OUT
from megatron_steps import BLIND, MEGATRON_FITTED
from nvidia_steps import NVIDIA_HELD_OUT
from published_steps import ROWS, Published
from published_table import means, table

from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import load

FREE = {
    "a100-80": ("matrix_share", "score_bytes", "element_share"),
    "a100-80-fused": ("matrix_share", "eager"),
    "h100-500w": ("matrix_share", "eager"),
    "h100": ("matrix_share", "eager"),
    "h200": ("matrix_share",),
    "b200": ("matrix_share",),
}
PRIOR, NOISE = 0.15, 0.02


def main() -> None:
    """Fit each profile, and print its figures and errors."""
    for name, free in FREE.items():
        rows = [row for row in (*ROWS, *FITTED, *MEGATRON_FITTED) if row.machine == name]
        start = load(name).machine("bf16")
        x = np.array([getattr(start, field) for field in free])
        changes, ridge = np.zeros(len(free)), np.eye(len(free)) * (NOISE / PRIOR) ** 2
        for _ in range(4):
            errors, slopes = _linear(start, free, x, changes, rows)
            changes -= np.linalg.solve(slopes.T @ slopes + ridge, slopes.T @ errors + ridge @ changes)
        errors, slopes = _linear(start, free, x, changes, rows)
        print(name, dict(zip(free, (x * np.exp(changes)).round(4).tolist(), strict=True)))
        left_out = []
        for index, row in enumerate(rows):
            keep = np.arange(len(rows)) != index
            some, rest = slopes[keep], errors[keep]
            moved = -np.linalg.solve(some.T @ some + ridge, some.T @ rest + ridge @ changes)
            left_out.append(np.expm1(errors[index] + slopes[index] @ moved))
            print(f"  {row.name:40} {np.expm1(errors[index]):+.1%}, left out {left_out[-1]:+.1%}")
        mean, without = (np.abs(each).mean() for each in (np.expm1(errors), np.array(left_out)))
        print(f"  mean {mean:.1%}, left out {without:.1%}")
    held = [*HELD_OUT, *BLIND, *NVIDIA_HELD_OUT]
    print("Held out:", table(held), means(held), sep="\n")


def _linear(
    start: Machine, free: tuple[str, ...], x: np.ndarray, changes: np.ndarray, rows: list[Published]
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithmic errors of the rows, and their slopes in the logarithms of the free figures."""

    def errors_at(at: np.ndarray) -> np.ndarray:
        machine = replace(start, **dict(zip(free, (x * np.exp(at)).tolist(), strict=True)))
        return np.log([row.seconds_on(machine) / row.seconds for row in rows])

    here = errors_at(changes)
    unit = np.eye(len(free)) * 0.02
    return here, np.stack([(errors_at(changes + step) - here) / 0.02 for step in unit], axis=1)


if __name__ == "__main__":
    main()
