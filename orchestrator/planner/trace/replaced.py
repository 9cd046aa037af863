"""Replacing an attribute of a module or class while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` within the context, and restore it afterwards.

    A trace runs the real engine, so that it records what a run does, but in one process and on tensors without
    memory. Some functions of torch and torch.distributed cannot work there or must be observed: collectives return
    work whose wait is an event of the trace, groups have no other members, and counts of tokens have no values. The
    engine calls them as attributes of modules, where torch offers no hook. Passing each of them through every layer of
    the engine would burden all runs with an interest of the planner alone.

    Args:
        owner: a module or a class.
        name: its attribute.
        value: what stands there within the context.

    Raises:
        AttributeError: if there is no such attribute, for instance after an upgrade of torch.
    """
    getattr(owner, name)
    original = vars(owner).get(name, MISSING)  # MISSING if a class inherits the attribute
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
