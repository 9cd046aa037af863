"""Validate manifests by KubeRay's own schema, as strictly as an API server: unknown fields are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def load_schemas(folder: Path) -> dict[str, dict[str, Any]]:
    """Load the strict schemas of version v1 by kind, from the CRD files of KubeRay's `config/crd/bases` in `folder`.

    Raises FileNotFoundError if the folder has none.
    """
    result = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the files have some 20,000 lines each
    for path in sorted(folder.glob("ray.io_*.yaml")):
        definition = loader(path.read_text()).get_single_data()["spec"]
        version = next(v for v in definition["versions"] if v["name"] == "v1")
        result[definition["names"]["kind"]] = strict(version["schema"]["openAPIV3Schema"])
    if not result:
        raise FileNotFoundError(f"no ray.io_*.yaml in {folder}")
    return result


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert an OpenAPI schema of Kubernetes to JSON Schema, without unknown fields; defaults make fields optional."""
    result = dict(schema)
    if isinstance(properties := schema.get("properties"), dict):
        result["properties"] = {name: strict(inner) for name, inner in properties.items()}
        result["required"] = [r for r in schema.get("required", []) if "default" not in properties.get(r, {})]
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = strict(schema[key])
    return result


def violations(manifest: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each violation of the schema of the manifest's kind; empty for kinds that are not KubeRay's."""
    from jsonschema import Draft202012Validator

    schema = schemas.get(manifest["kind"])
    if schema is None:
        return []
    return [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(manifest)
    ]
