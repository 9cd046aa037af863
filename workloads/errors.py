"""The exception that workloads raise for invalid requests."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A model, objective or checkpoint does not fit the request. The message is one line with a hint."""
