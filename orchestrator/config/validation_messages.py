"""pydantic's errors as one line each: the problem, the key, and a hint."""

from __future__ import annotations

import copy
import difflib
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestrator.config.errors import InputError
from orchestrator.config.other_names import KEYS, VALUES
from orchestrator.observe.sinks.config import BY_PLACE
from workloads.own.object_reference import PATTERN as OWN

WORDS = {
    "int_parsing": "should be a whole number",
    "int_type": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "string_type": "should be text, in quotes where YAML takes it for something else",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
    "dict_type": "should be a mapping of keys to values",
}
"""Types of pydantic errors whose messages describe its parser."""
NUMBERS = ("int_parsing", "float_parsing")
"""Types of pydantic errors of texts in place of numbers."""
PATTERNS = {
    "name": "1 to 63 letters a-z, digits, dots, dashes and underscores, a letter or a digit first",
}
"""Descriptions of the patterns of keys."""
NEAR = 0.8
"""Likeness of two names (difflib's ratio) from which on one is taken for the other, misspelled."""
SHOWN = 3
"""Maximum number of places of a key that a hint lists."""
_KEY = re.compile(r"[a-z_]+(\.\w+)+")
"""A hint that is only a key."""


def input_error(error: ValidationError, where: str, root: type[BaseModel]) -> InputError:
    """Return the errors of a document as an InputError, the clearest first. `where` names the document's file."""
    reference_paths = {
        _path_of(problem) for problem in error.errors() if problem.get("ctx", {}).get("pattern") == OWN
    }
    reference_paths |= {
        _path_of(problem) for problem in error.errors() if "ObjectReference" in problem["loc"]
    }
    first, *others = (_problem(problem, where, root, reference_paths) for problem in _clear(error))
    return InputError(first.what, first.where, first.hint, others)


class WrongKeys(InputError):
    """Some keys of a document are wrong. `rest` is the document with defaults filled in."""

    rest: Any


def refused(
    document: Mapping[str, Any], error: ValidationError, where: str, root: type[BaseModel]
) -> InputError:
    """Like `input_error`, but returns WrongKeys if the document without its wrong keys is a valid `root`."""
    problem = input_error(error, where, root)
    try:
        rest = root.model_validate(_without_wrong(document, error))
    except ValidationError:
        return problem
    wrong = WrongKeys(problem.what, problem.where, problem.hint, problem.others)
    wrong.rest = rest
    return wrong


def _without_wrong(document: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return the document without the keys that caused the error, so that the rest can be checked too."""
    rest = copy.deepcopy(dict(document))
    for problem in error.errors():
        node: Any = rest
        names: list[Any] = [part for part in problem["loc"] if not _is_tag(part)] or [""]
        for part in names[:-1]:
            inside = isinstance(node, list) and isinstance(part, int) and part < len(node)
            node = node[part] if inside else node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(names[-1], None)
    return rest


def _problem(
    error: Mapping[str, Any], where: str, root: type[BaseModel], reference_paths: Collection[tuple[str, ...]]
) -> InputError:
    """Return the error at one key. Keys in `reference_paths` may also name the user's own code."""
    names = _path_of(error)
    location = f"{where}: {'.'.join(names)}" if any(names) else where
    if error["type"] == "extra_forbidden":
        key, colon, text = names[-1].partition(":")
        if colon and key.isidentifier():
            return InputError(
                "unknown key", location, f"put a blank after the colon, as in {{{key}: {text}}}"
            )
        model, is_named_by_user = _model_at(root, error["loc"][:-1])
        known = _keys_of(model)
        if is_named_by_user:
            return InputError("unknown key", location, _nearest(names[-1], known))
        return InputError("unknown key", location, _meant(names, known, root))
    if error["type"] == "missing":
        return InputError("is missing", location, "add it; `orchestrator schema` describes it")
    value = error.get("input")
    got = f" (got {value!r})" if isinstance(value, str | int | float | bool) else ""
    if error["type"] == "model_type":
        return InputError(f"must be a mapping of keys to values{got}", location, _listed(root, error["loc"]))
    if error["type"] == "string_pattern_mismatch" and names[-1] in PATTERNS:
        return InputError(f"is not a name{got}", location, f"use {PATTERNS[names[-1]]}")
    message = WORDS.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
    message = message.removeprefix("Input ")
    hint = "choose one of these, or your own module:name" if names in reference_paths else ""
    if error["type"] in ("list_type", "tuple_type"):
        keys = _keys(root, error["loc"])
        hint = f"begin each entry with a dash; the keys of an entry: {', '.join(keys)}" if keys else ""
        hint = hint or "put it in brackets, as in [a, b]"
    if "or_mapping_at" in error and names not in reference_paths:
        message += " or a mapping of keys to values"
        hint = _listed(root, error["or_mapping_at"])
    if isinstance(value, str):
        expected = re.findall("'([^']*)'", message) if error["type"] == "literal_error" else []
        near = difflib.get_close_matches(value.lower(), expected, 1, NEAR)
        hint = f"did you mean '{near[0]}'?" if near else hint
        if error["type"] not in NUMBERS:
            hint = VALUES.get(value.lower(), hint)
    return InputError(message[:1].lower() + message[1:] + got, location, hint)


def _meant(names: tuple[str, ...], known: list[str], root: type[BaseModel]) -> str:
    """Return a hint for an unknown key.

    In order of preference: its name in another system, the places where `root` has a key of that name, or the nearest
    of the `known` keys.
    """
    *parents, last = names
    if (replacement := BY_PLACE.get(".".join(parents[-2:]))) and not difflib.get_close_matches(
        last, known, 1, NEAR
    ):
        return replacement
    if last in KEYS:
        return f"it is {KEYS[last]} here" if _KEY.fullmatch(KEYS[last]) else KEYS[last]

    def shared(path: str) -> int:
        return len([1 for name, other in zip(parents, path.split("."), strict=False) if name == other])

    if paths := sorted(_places(root, last), key=lambda path: (-shared(path), path.count("."))):
        highest = min(path.count(".") for path in paths)
        paths = [path for path in paths if path.count(".") <= highest + 1]
        return f"did you mean {' or '.join(paths[:SHOWN])}?"
    return _nearest(last, known)


def _nearest(name: str, known: list[str]) -> str:
    """Return a hint with the nearest of the known keys, or with all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"


def _listed(root: type[BaseModel], location: Iterable[Any]) -> str:
    """Return a hint with the keys of the mapping at `location`."""
    return f"its keys: {', '.join(_keys(root, location))}"


def _places(model: type[BaseModel], name: str, within: str = "") -> list[str]:
    """Return the dotted names under which a document of `model` has keys called `name`. The first item of a list
    stands for all.
    """
    result = [within + name] if name in model.model_fields else []
    for key, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        listed = typing.get_origin(field.annotation)
        if inner is not None and listed is not dict:
            result += _places(inner, name, f"{within}{key}.{'0.' if listed is list else ''}")
    return result


def _clear(error: ValidationError) -> list[dict[str, Any]]:
    """Return one error for each key, missing keys last. For a union, return the error of the closest member.

    The error of a value that may also be a mapping has the location of that as `or_mapping_at`.
    """
    errors: list[dict[str, Any]] = [dict(e) for e in error.errors()]
    deeper = [e for e in errors if not any(_is_branch(e["loc"], o["loc"]) for o in errors if o is not e)]
    deeper = [e for e in deeper if not _is_of_an_unlike_member(e["loc"], deeper)]
    deeper.sort(key=lambda e: e["type"] == "missing")
    mappings = {_path_of(e): e["loc"] for e in deeper if e["type"] == "model_type"}
    for e in deeper:
        if e["type"] == "literal_error" and _path_of(e) in mappings:
            e["or_mapping_at"] = mappings[_path_of(e)]
    return list({_path_of(e): e for e in reversed(deeper)}.values())[::-1]


def _path_of(error: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of an error as the user wrote it, without pydantic's tags for members of a union."""
    *path, last = error["loc"] or ("",)
    names = tuple(str(part) for part in path if not _is_tag(part))
    return (*names, str(last)) if error["type"] == "extra_forbidden" or not _is_tag(last) else names


def _is_tag(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part[:1].isupper() or part in ("str", "constrained-str"))


def _is_branch(loc: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether `loc` only says that one member of a union does not match while another is closer."""
    return _is_tag(loc[-1]) and len(other) > len(loc) and loc[:-1] == other[: len(loc) - 1]


def _is_of_an_unlike_member(loc: tuple[Any, ...], errors: list[dict[str, Any]]) -> bool:
    """Return whether `loc` is in a union member with other keys, while another member only has a wrong value."""
    for depth, part in enumerate(loc[:-1]):
        if _is_tag(part):
            unlike: dict[Any, bool] = {}
            for each in errors:
                if each["loc"][:depth] == loc[:depth] and len(each["loc"]) > depth + 1:
                    strange = each["type"] in ("missing", "extra_forbidden")
                    unlike[each["loc"][depth]] = unlike.get(each["loc"][depth], False) or strange
            if unlike[part] and not all(unlike.values()):
                return True
    return False


def _keys(root: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """Return the keys of the model `root` at `location`."""
    return _keys_of(_model_at(root, location)[0])


def _keys_of(model: type[BaseModel] | None) -> list[str]:
    return list(model.model_fields) if model is not None else []


def _model_at(root: type[BaseModel], location: Iterable[Any]) -> tuple[type[BaseModel] | None, bool]:
    """Return the model within `root` at `location`, and whether its key was named by the user, as in `tune.space`."""
    model: type[BaseModel] | None = root
    is_named_by_user = False
    for part in location:
        if model is not None and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
            is_named_by_user = False
        elif isinstance(part, str) and not _is_tag(part):
            is_named_by_user = True
    return model, is_named_by_user


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model class within a type annotation such as list[Source] or Workers | None."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((m for a in typing.get_args(annotation) if (m := _model_in(a)) is not None), None)
