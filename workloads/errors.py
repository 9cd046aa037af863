"""The one exception that workloads raise for a wrong request."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A model, objective or checkpoint that does not fit; the message is one line with a hint."""
