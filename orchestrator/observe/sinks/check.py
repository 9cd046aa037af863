"""Find the sinks that a job names, and check that each can be built. Imports no sink's library."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.observe.sinks.config import SinkSpec
from workloads.errors import WorkloadError
from workloads.own.object_reference import load


def parts_of(config: SinkSpec) -> dict[str, Any]:
    """Return the sinks of this project that a job names: the part of the job file by its key."""
    return {key: part for key in type(config).model_fields if key != "own" and (part := getattr(config, key))}


def module_of(key: str) -> Any:
    """Return the module of a sink of this project. It imports its library only when the sink is built."""
    return importlib.import_module(f"orchestrator.observe.sinks.{key}_sink")


def libraries_of(config: SinkSpec) -> dict[str, str]:
    """Return the module that each of the job's sinks imports, by the key of the sink."""
    return {key: module_of(key).LIBRARY for key in parts_of(config)}


def check_sinks(config: SinkSpec | None) -> None:
    """Refuse sinks whose library is not installed, and user sinks that cannot be imported. Raises InputError."""
    if config is None:
        return
    for key, library in libraries_of(config).items():
        if not find_spec(library):
            problem = f"needs the library {library.partition('.')[0]}, which is not installed"
            raise InputError(problem, f"sinks.{key}", install("sinks"))
    for user_sink in config.own:
        try:
            sink = load(user_sink.use)
        except WorkloadError as error:
            raise InputError(str(error), "sinks.own") from None
        if missing := [
            name for name in ("rows", "events", "close") if not callable(getattr(sink, name, None))
        ]:
            problem = f"{user_sink} has no method {missing[0]}"
            raise InputError(problem, "sinks.own", "see orchestrator.observe.sinks.sink.Sink")
