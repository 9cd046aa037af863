"""Quarantine of damaged or missing files of prepared data on a store: they are renamed and noted, so that they are
made again.
"""

from __future__ import annotations

from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.retry import storage_failed

NOTE = "damaged.json"
"""The file that notes that another one is damaged or missing, because listing all files of a store takes long."""


def put_aside(folder: DataFolder, name: str) -> None:
    """Rename a file to `<name>.damaged`, if it exists, and note that it is missing. Failing storage is ignored."""
    try:
        if (data := folder.read(name)) is not None:
            folder.write(f"{name}.damaged", data)
            folder.remove(name)
        folder.write_json(NOTE, {"file": name})
    except Exception as error:
        if not storage_failed(error):
            raise


def is_noted(folder: DataFolder) -> bool:
    """Return whether a file is known to be missing."""
    return folder.read(NOTE) is not None


def clear_note(folder: DataFolder) -> None:
    """Remove the note, because all files exist again."""
    if is_noted(folder):
        folder.remove(NOTE)
