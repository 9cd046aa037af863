"""Files of prepared data on a store that are damaged or missing: put aside, and noted, so that they are made again."""

from __future__ import annotations

from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.retry import storage_failed

NOTE = "damaged.json"
"""The file that says that one of the others is damaged or missing; listing all of them takes long on a store."""


def put_aside(folder: DataFolder, name: str) -> None:
    """Rename a file to `<name>.damaged`, if it is there, and note that it is missing; nothing if storage fails."""
    try:
        if (data := folder.read(name)) is not None:
            folder.write(f"{name}.damaged", data)
            folder.remove(name)
        folder.write_json(NOTE, {"file": name})
    except Exception as error:
        if not storage_failed(error):
            raise


def is_noted(folder: DataFolder) -> bool:
    """Whether a file is known to be missing."""
    return folder.read(NOTE) is not None


def clear_note(folder: DataFolder) -> None:
    """All files are there again."""
    if is_noted(folder):
        folder.remove(NOTE)
