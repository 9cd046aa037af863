"""What is published of data that is still prepared: a manifest of each section's shards, written when all of them are
there, in order.

    <prepared data>/sections/000000.json    as manifest.json, of the shards that section 0 needs

manifest.json takes their place when all is prepared.
"""

from __future__ import annotations

import dataclasses

from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, PreparedSource

SUMMED = ("tokens", "documents", "bytes", "inner_ends")
"""What sections add up to."""


class StoppedWaiting(Exception):
    """The process was asked to stop before the data was there that it waited for."""


def section_name(number: int) -> str:
    """The file of section `number`."""
    return f"sections/{number:06d}.json"


def publish(folder: DataFolder, number: int, section: DataManifest) -> None:
    """Publish the shards of a section."""
    manifest.write(folder, section, section_name(number))


def read_section(folder: DataFolder, number: int) -> DataManifest | None:
    """The shards of a section, None if they are not all there yet. Raises InputError as `manifest.read`."""
    return manifest.read(folder, section_name(number))


def joined(before: DataManifest, section: DataManifest) -> DataManifest:
    """The data up to a section: its shards after those before."""
    sources = tuple(
        PreparedSource(one.uri, one.shards + more.shards)
        for one, more in zip(before.sources, section.sources, strict=True)
    )
    sums = {name: getattr(before, name) + getattr(section, name) for name in SUMMED}
    return dataclasses.replace(before, sources=sources, **sums)


def so_far(folder: DataFolder) -> tuple[DataManifest, int] | None:
    """The data as far as it is published, and of how many sections that is; None if of none."""
    found = read_section(folder, 0)
    number = 1
    if found is None:
        return None
    while more := read_section(folder, number):
        found = joined(found, more)
        number = number + 1
    return found, number


def read(folder: DataFolder) -> DataManifest | None:
    """The manifest of prepared data, or of as much as is published; None if there is none."""
    if whole := manifest.read(folder):
        return whole
    found = so_far(folder)
    return found[0] if found else None
