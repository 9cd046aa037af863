"""A rank program that runs several tasks, one after another, and tells the rows of each or how it failed."""

from __future__ import annotations

import threading
from typing import Any

import torch

from cluster.workers.rank_process import describe, serve_store
from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.shared_memory import SharedBuffer
from orchestrator.parallel.device import close_device
from orchestrator.train.engines.torch_engine import TorchEngine
from orchestrator.train.instability import LossSpike, NonFinite
from orchestrator.train.loop import main


def alone(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Each task alone in the world; name -> rows, or the error."""
    found: dict[str, Any] = {}
    for name, task in config.items():
        store = serve_store("127.0.0.1")
        found[name] = _rows_of(task, WorkerContext(RankInfo(0, 1, 0, "127.0.0.1", store.port), store))
        context.report(len(found))
    return found


def together(config: dict[str, Any], context: WorkerContext) -> Any:
    """One task over the gang; rank 0's rows, then the error."""
    return _rows_of(config, context)


def stubborn(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """One task of which nothing can be left in good order, as behind collectives that never match."""
    forever: Any = lambda *_, **__: threading.Event().wait()  # noqa: E731
    torch.distributed.destroy_process_group = forever
    TorchEngine.close = forever
    SharedBuffer.close = forever
    Saver.close = forever
    return main(config, context)


def _rows_of(task: dict[str, Any], context: WorkerContext) -> Any:
    error, at = "", None
    try:
        main(task, context)
    except Exception as found:
        close_device()  # the next task is in this process too
        error = describe(found)
        at = (found.step, found.position) if isinstance(found, (NonFinite, LossSpike)) else None
    return {"rows": [_kept(row) for row in context.unsaved_rows()], "error": error, "at": at}


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("step", "loss", "lr", "grad_norm", "samples", "tokens")}


def timed(config: dict[str, Any], context: WorkerContext) -> list[dict[str, Any]]:
    """One task over the gang; rank 0's whole rows."""
    main(config, context)
    return context.unsaved_rows()
