from __future__ import annotations

from orchestrator.data.warm import await_warm, warm_workers


def test_nothing_is_begun_where_this_process_has_started_no_cluster() -> None:
    assert warm_workers(3, "{}") == []
    await_warm([])
