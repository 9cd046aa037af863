"""Workers of a cluster that was just started import what they need while this process imports Ray Data: each takes a
second for it."""

from __future__ import annotations

from typing import Any

from cluster.workers import ray_internals

WAIT = 30.0
"""Seconds for workers to be ready; tasks begin without it too."""


def warm_workers(parts: int, tokenizer: str = "") -> list[Any]:
    """Have as many workers as CPUs are free, and parts to do, import what tokenises, and prove the faster engine for a
    tokenizer's JSON, if this process has started the cluster; returns what `await_warm` waits for."""
    if not parts or not ray_internals.started_here():
        return []
    import ray

    def warm(text: str) -> None:
        import ray.data  # noqa: F401, what unpickles the tasks

        from orchestrator.data import shards  # noqa: F401
        from orchestrator.data.encoding import engines

        if text:
            engines.fast(text)

    task = ray.remote(num_cpus=0, max_retries=0)(warm)
    count = min(parts, int(ray.available_resources().get("CPU", 0)))
    return [task.remote(tokenizer) for _ in range(count)]


def await_warm(begun: list[Any]) -> None:
    """Wait until the workers are ready: tasks that come before would have others started for them."""
    if begun:
        import ray

        ray.wait(begun, num_returns=len(begun), timeout=WAIT)
