"""A description of every key of the job file: type, default and meaning, from the JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.other_names import KEYS
from orchestrator.config.records import OBJECTIVES
from orchestrator.config.strict import LARGEST

WHOLE = "job"
"""The name of the job file as a whole."""
NEAR = 0.75
"""Likeness of two names (difflib's ratio) from which on one is taken for the other, misspelled."""
MOST_ALIKE = 5
"""Maximum number of keys to suggest for an unknown one."""


@dataclass(frozen=True)
class Key:
    """One key of an object, by its last name. The default is in YAML form; it is empty for a required key."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """The keys of the object at a dotted `path`, which is empty for the job itself, and the purpose of the object."""

    path: str
    text: str
    keys: tuple[Key, ...]


@lru_cache
def sections() -> tuple[Section, ...]:
    """Return all objects of the job file, each before the objects within it."""
    from orchestrator.config.spec import JobSpec

    schema = JobSpec.model_json_schema()
    return tuple(_sections("", schema, schema["$defs"]))


def sections_of(key: str) -> list[Section]:
    """Return the sections of a dotted key and of the keys below it.

    WHOLE gives all sections. A key that is not an object gives its section with that key alone. Raises InputError for
    an unknown key.
    """
    if key == WHOLE:
        return list(sections())
    below = [s for s in sections() if s.path == key or s.path.startswith(f"{key}.")]
    if below:
        return below
    above, _, last = key.rpartition(".")
    result = [
        Section(s.path, "", tuple(k for k in s.keys if k.name == last))
        for s in sections()
        if s.path == above and any(k.name == last for k in s.keys)
    ]
    if result:
        return result
    raise InputError("the job file has no such key", key, _near(last))


def _near(word: str) -> str:
    """Return a hint about a word that is not a key there: keys of that name elsewhere, its name in another system, or
    the keys that have it among their values or in their descriptions.
    """
    every = [(f"{s.path}.{k.name}".lstrip("."), k) for s in sections() for k in s.keys]
    alike = [path for path, k in every if k.name == word]
    if not alike and word in KEYS:
        return KEYS[word]
    if not alike and word in OBJECTIVES:
        return f"it is a value of workload.objective: {word}"
    whole_word = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    alike = alike or [path for path, k in every if whole_word.search(k.type)]
    alike = alike or [path for path, k in every if whole_word.search(k.meaning)]
    near = get_close_matches(word, {k.name for _, k in every}, 1, NEAR)
    alike = alike or [path for path, k in every if k.name in near]
    likely = ", ".join(list(dict.fromkeys(alike))[:MOST_ALIKE])
    return f"did you mean {likely}?" if likely else f"`orchestrator schema {WHOLE}` has all of them"


def _sections(path: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Section]:
    required = set(schema.get("required", ()))
    inner = []
    keys = []
    for other in schema.get("anyOf", ()):  # one of two alternatives is required
        required |= set(other.get("required", ()))
    for key, field in schema["properties"].items():
        names = sorted(_referred(field))
        inner += [(f"{path}.{key}" if path else key, name) for name in names]
        default = "" if key in required else _default(field)
        keys.append(Key(key, _type(field), default, _meaning(field, definitions)))
    yield Section(path, schema.get("description", ""), tuple(keys))
    for inner_path, name in inner:
        yield from _sections(inner_path, definitions[name], definitions)


def _default(field: Mapping[str, Any]) -> str:
    """Return the default of an optional key."""
    if "default" in field:
        return _code(field["default"])
    return {"array": "[]", "object": "{}"}.get(field.get("type", ""), "see its keys")


def _meaning(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the purpose of a key: the field's description, else the first sentence of its type's docstring."""
    held = [definitions[name].get("description", "") for name in sorted(_referred(field))]
    return str(field.get("description") or " ".join(held).split(". ")[0].rstrip("."))


def _referred(field: Any) -> set[str]:
    """Return the names of the definitions that a field refers to, at any depth."""
    if isinstance(field, Mapping):
        names = {field["$ref"].rsplit("/", 1)[-1]} if "$ref" in field else set()
        return names.union(*(_referred(value) for value in field.values()), set())
    if isinstance(field, list):
        return set().union(*(_referred(value) for value in field), set())
    return set()


def _type(field: Mapping[str, Any]) -> str:
    """Return the type of a field in a few words, with its bounds."""
    if "$ref" in field:
        return "object, see below"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(option) for option in field["anyOf"]))
    if "enum" in field:
        return ", ".join(_code(value) for value in field["enum"])
    if "const" in field:
        return _code(field["const"])
    kind = field.get("type", "any")
    if kind == "array":
        items = field.get("prefixItems")
        return f"list of {len(items)}" if items else f"list of {_type(field.get('items', {}))}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    within = [(sign, field[name]) for name, sign in bounds.items() if name in field]
    limits = ", ".join(f"{sign} {bound:g}" for sign, bound in within if bound != LARGEST)
    return f"{kind} {limits}".strip()


def _code(value: Any) -> str:
    """Return a value in YAML form."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
