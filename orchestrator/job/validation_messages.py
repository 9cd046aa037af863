"""pydantic's errors as one line: the clearest of them, the key, and a hint."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestrator.job.errors import InputError


def input_error(error: ValidationError, where: str, root: type[BaseModel]) -> InputError:
    """The clearest error of a document that is no `root`, as one line; `where` names its file."""
    first, others = _clearest(error)
    names = _path_of(first)
    more = f" (and {others} more)" if others else ""
    location = f"{where}: {'.'.join(names)}" if any(names) else where
    if first["type"] == "extra_forbidden":
        known = _keys(root, first["loc"][:-1])
        near = difflib.get_close_matches(names[-1], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return InputError(f"unknown key{more}", location, hint)
    if first["type"] == "missing":
        return InputError(f"is missing{more}", location, "add it; `orchestrator schema` describes it")
    value = first.get("input")
    got = f" (got {value!r})" if isinstance(value, str | int | float | bool) else ""
    if first["type"] == "model_type":
        hint = f"its keys: {', '.join(_keys(root, first['loc']))}"
        return InputError(f"must be a mapping of keys to values{got}{more}", location, hint)
    message = str(first["msg"]).removeprefix("Value error, ")
    return InputError(message[:1].lower() + message[1:] + got + more, location)


def _clearest(error: ValidationError) -> tuple[Any, int]:
    """The clearest error, and how many others there are. For a union, the error of the member that came nearest."""
    errors: list[dict[str, Any]] = [dict(e) for e in error.errors()]
    deeper = [e for e in errors if not any(_is_branch(e["loc"], o["loc"]) for o in errors if o is not e)]
    deeper.sort(key=lambda e: e["type"] == "missing")
    return deeper[0], len({_path_of(e) for e in deeper}) - 1


def _path_of(error: Mapping[str, Any]) -> tuple[str, ...]:
    """The key of an error as the user wrote it, without pydantic's tags for members of a union."""
    *path, last = error["loc"] or ("",)
    names = tuple(str(part) for part in path if not _is_tag(part))
    return (*names, str(last)) if error["type"] == "extra_forbidden" or not _is_tag(last) else names


def _is_tag(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part[:1].isupper() or part == "str")


def _is_branch(loc: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether `loc` only says that one member of a union does not match, where another member came nearer."""
    return _is_tag(loc[-1]) and len(other) > len(loc) and loc[:-1] == other[: len(loc) - 1]


def _keys(root: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """The keys that the model `root` has at `location`."""
    model: type[BaseModel] | None = root
    for part in location:
        if model is not None and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields) if model is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model class within a type annotation such as list[Source] or Workers | None."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((m for a in typing.get_args(annotation) if (m := _model_in(a)) is not None), None)
