"""Merge a file of the user's own fields into rendered documents: annotations, sidecars, disk images, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.document import parse_yaml
from orchestrator.config.errors import InputError
from orchestrator.extensions.render.manifests import note, refuse_secrets

GROUP_NAME = "groupName"
ENTRY_KEYS = (GROUP_NAME, "mountPath", "name")
"""The keys that identify an entry of a list, as in Kubernetes' own merge. The first that all entries have is used."""


def read_overlay(path: Path | None) -> dict[str, Any]:
    """Return the mapping in an overlay file; an empty one without a file. Raises InputError."""
    if path is None:
        return {}
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text in UTF-8"
        raise InputError(f"cannot be read ({reason})", f"--overlay {path}", "give a YAML file") from None
    overlay = parse_yaml(text, str(path))
    refuse_secrets(overlay, path)
    return overlay


def overlay_kinds(files: Mapping[str, Any], overlay: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Return Kubernetes manifests with an overlay merged in, whose keys are kinds such as RayJob.

    Raises InputError if no manifest has a kind.
    """
    kinds = [manifest["kind"] for manifest in files.values()]
    if unknown := [kind for kind in overlay if kind not in kinds]:
        problem = f"the overlay names kind {unknown[0]!r}, which this command does not render"
        raise InputError(problem, str(path), f"it renders {', '.join(kinds)}")
    return {name: merged(manifest, overlay.get(manifest["kind"], {})) for name, manifest in files.items()}


def merged(document: Any, overlay: Any, where: str = "") -> Any:
    """Return a document with an overlay merged in: a JSON merge patch (RFC 7396), except that named entries merge.

    - A mapping is merged key by key. A null removes the key.
    - A list whose entries have names, in both and each its own, is merged by these: the same name merges, a new one is
      added.
    - Anything else replaces what was there, without its nulls. For a list a note says so.

    Args:
        document: what was rendered.
        overlay: what the user adds.
        where: the path of both within the file, for messages.

    Raises:
        InputError: the overlay names a worker group that was not rendered, or a name is no text.
    """
    if isinstance(document, Mapping) and isinstance(overlay, Mapping):
        result = dict(document)
        for key, value in overlay.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(document.get(key), value, f"{where}.{key}" if where else str(key))
        return result
    if isinstance(overlay, Mapping):
        return merged({}, overlay, where)  # removes nulls
    if isinstance(document, list) and isinstance(overlay, list) and document:
        for key in ENTRY_KEYS:
            if _has_names(document, key) and all(
                isinstance(each, Mapping) and key in each for each in overlay
            ):
                if wrong := [each[key] for each in overlay if not isinstance(each[key], str)]:
                    hint = f"give each entry a text as {key}"
                    raise InputError(f"{wrong[0]!r} is no {key}", f"--overlay: {where}", hint)
                if _has_names(overlay, key):
                    return _merged_by_name(document, overlay, key, where)
        note(f"{where}: the overlay's list replaces {len(document)} rendered entries")
    return _without_nulls(overlay)


def _without_nulls(value: Any) -> Any:
    """Return what an overlay's list holds without nulls at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value if each is not None]
    return value


def _has_names(entries: Sequence[Any], key: str) -> bool:
    """Return whether each entry has a name of its own under the key."""
    names = [entry.get(key) for entry in entries if isinstance(entry, Mapping)]
    texts = {name for name in names if isinstance(name, str)}
    return len(texts) == len(entries)


def _merged_by_name(
    document: Sequence[Any], overlay: Sequence[Any], key: str, where: str
) -> list[Mapping[str, Any]]:
    result = {entry[key]: entry for entry in document}
    for entry in overlay:
        name = entry[key]
        if key == GROUP_NAME and name not in result:
            raise InputError(
                f"there is no group {name!r}", f"--overlay: {where}", f"groups: {', '.join(result)}"
            )
        result[name] = merged(result.get(name, {}), entry, f"{where}.{name}")
    return list(result.values())
