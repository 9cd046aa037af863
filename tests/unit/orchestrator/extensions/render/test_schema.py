"""An OpenAPI schema made strict, on a small one of our own: these hold where KubeRay's files are absent."""

from pathlib import Path

import pytest
import yaml

from orchestrator.extensions.render.manifests import load_schemas, strict, violations

SCHEMA = {
    "type": "object",
    "required": ["size", "name"],
    "properties": {
        "size": {"type": "integer", "default": 1},
        "name": {"type": "string"},
        "kind": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "parts": {"type": "array", "items": {"type": "object", "properties": {"type": {"type": "string"}}}},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {}},
    },
}


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"name": "a"}, []),
        ({"name": "a", "labels": {"any": "thing"}, "free": {"x": 1}, "parts": [{"type": "t"}]}, []),
        ({}, ["$: 'name' is a required property"]),
        ({"name": "a", "nme": "b"}, ["$: Additional properties are not allowed ('nme' was unexpected)"]),
        (
            {"name": "a", "parts": [{"tpe": "t"}]},
            ["$.parts[0]: Additional properties are not allowed ('tpe' was unexpected)"],
        ),
        ({"name": "a", "labels": {"n": 1}}, ["$.labels.n: 1 is not of type 'string'"]),
    ],
)  # fmt: skip
def test_strict(fields: dict[str, object], lines: list[str]) -> None:
    assert violations({"kind": "Thing", **fields}, {"Thing": strict(SCHEMA)}) == lines


def test_kinds_without_a_schema_are_not_judged() -> None:
    assert violations({"kind": "ConfigMap", "x": 1}, {}) == []


def test_schemas_are_found_by_kind(tmp_path: Path) -> None:
    versions = [
        {"name": "v1alpha1", "schema": {"openAPIV3Schema": {}}},
        {"name": "v1", "schema": {"openAPIV3Schema": SCHEMA}},
    ]
    definition = {"spec": {"names": {"kind": "Thing"}, "versions": versions}}
    (tmp_path / "ray.io_things.yaml").write_text(yaml.safe_dump(definition))
    assert load_schemas(tmp_path) == {"Thing": strict(SCHEMA)}
    with pytest.raises(FileNotFoundError, match=r"no ray\.io"):
        load_schemas(tmp_path / "elsewhere")
