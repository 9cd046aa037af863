"""Write rendered files, after checks for secrets and against rules and schemas."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.redact import hidden_at, redact
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.spec import JobSpec
from orchestrator.extensions.render import checks
from orchestrator.launch.job_needs import needed_libraries, store_libraries
from orchestrator.launch.job_paths import local, read_paths, written_paths


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


NOT_TEXT = re.compile(r"[yYnN]|[-+]?\.?\d[\d_.:]*([eE][-+]?\d*)?|0[xXoObB][\da-fA-F_]+")
"""Text that kubectl's YAML parser may read as another type, unlike Python's: n as no, 1e6 as a number."""
MARK = "# written by `orchestrator cluster render`, which may overwrite it"
"""The first line of a file that this command may replace."""


def refuse_secrets(document: Mapping[str, Any], path: Path) -> None:
    """Raise InputError, with the key, if the job has a credential. Rendered files are read by many and kept."""
    if where := hidden_at(document):
        hint = "take it out; the pods get credentials from a Secret"
        raise InputError("carries a credential, but rendered files must not", f"{path}: {where}", hint)


def refuse_labels(resources: ResourceSpec, system: str, unit: str) -> None:
    """Raise InputError if the job asks for labelled nodes, which `system` cannot start."""
    if resources.per_worker.labels:
        where, hint = "resources.per_worker.labels", f"leave it out: all nodes of the {unit} are the job's"
        raise InputError(f"nodes of {system} are started without labels", where, hint)


def warn_of_local_paths(spec: JobSpec, mounted: str = "") -> None:
    """Print a note about local paths, which exist on one machine only. Paths under `mounted` are shared by all."""
    shared_path = f"a path under {mounted}" if mounted else "a URI"
    if local_paths := local(read_paths(spec), mounted):
        note(
            f"every worker reads {', '.join(local_paths)} locally: put it into the image, or set {shared_path}"
        )
    written = written_paths(spec)
    if local_paths := [key for key, path in written.items() if local([path], mounted)]:
        note(f"{', '.join(local_paths)} would be on one machine, and lost with it; give {shared_path}")


def warn_of_libraries(spec: JobSpec, runs: str = "") -> None:
    """Print a note about optional libraries that the job, or the store of its `runs`, needs in the image."""
    needs = [need for need in (*store_libraries(runs), *needed_libraries(spec)) if need.extra]
    if needs:
        why = ", ".join(dict.fromkeys(f"{need.key} needs {need.library}" for need in needs))
        extras = ",".join(dict.fromkeys(need.extra for need in needs))
        note(f"{why}: install the extras {extras} there; infra/Dockerfile has --build-arg EXTRAS={extras}")


def note(text: str) -> None:
    """Print a note to standard error; nothing for an empty text."""
    if text:
        print(f"note: {text}", file=sys.stderr)


def say_next(command: str, written: Path | None, remark: str = "") -> None:
    """Print the command that takes what is written, and a remark, to standard error; nothing if no file is written."""
    if written is not None:
        more = f"; {remark}" if remark else ""
        print(f"next: {command} {shlex.quote(str(written))}{more}", file=sys.stderr)


def no_password(text: str, option: str) -> str:
    """Return the value of an option. Raises InputError if it has a credential."""
    if redact(text) != text:
        raise InputError("carries a credential, but rendered files must not", option, "take it out of it")
    return text


def check(files: dict[str, Any], crds: Path | None) -> None:
    """Check the manifests by our own rules and, with its CRD files, by KubeRay's schema. Raises InputError."""

    try:
        schemas = load_schemas(crds) if crds else {}
    except FileNotFoundError as error:
        raise InputError(str(error), "--crds", "give the folder with KubeRay's CRD files") from None
    for name, manifest in files.items():
        for line in checks.check(manifest) + violations(manifest, schemas):
            raise InputError(line, name)


def _is_rendered(path: Path) -> bool:
    """Whether `write` has written a file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().rstrip() == MARK.encode()


def write_text(name: str, text: str, to: Path | None) -> None:
    """Write a text with MARK in its second line to a folder or standard output. Raises InputError as `write` does."""
    if to is None:
        print(text, end="")
        return
    path = to / name
    try:
        if os.path.lexists(path) and MARK not in path.read_text().splitlines()[:2]:
            raise InputError("was not written by this command", str(path), "move it away")
        to.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", str(to), "give another folder") from None
    print(f"{name} written to {to}")


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, lines as lines, and quotes text that a parser could read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _style(text: str) -> str | None:
    if "\n" in text:
        return "|"
    return "'" if NOT_TEXT.fullmatch(text) else None


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, _style(text))
)


def yaml_of(document: Any) -> str:
    """Return a manifest as YAML."""
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True))


def write(files: dict[str, Any], to: Path | None, replaces: str = "") -> None:
    """Write each file to the folder `to`, or all files as one stream to standard output.

    Raises InputError if a file exists that this command did not write. Nothing is written then.

    Args:
        files: the documents by file name.
        to: the folder, None for standard output.
        replaces: the name of a file that is removed if this command wrote it, since these files replace it.
    """
    texts = {name: yaml_of(document) for name, document in files.items()}
    if to is None:
        print("---\n".join(text for name, text in texts.items() if name != "kustomization.yaml"), end="")
        return
    try:
        for name in texts:
            if os.path.lexists(to / name) and not _is_rendered(to / name):
                raise InputError("was not written by this command", str(to / name), "move it away")
        to.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (to / name).write_text(f"{MARK}\n{text}", encoding="utf-8")
        if replaces and _is_rendered(to / replaces):
            (to / replaces).unlink()
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", str(to), "give another folder") from None
    print(f"{', '.join(texts)} written to {to}")
