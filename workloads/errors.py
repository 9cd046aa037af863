"""The exceptions that workloads raise for invalid requests."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A model, objective or checkpoint does not fit the request. The message is one line with a hint."""


class LogitsNotFinite(WorkloadError):
    """The logits of a model that generates or scores text are not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite; it has diverged")
