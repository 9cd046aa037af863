"""The published part of data that is still being prepared: one manifest for each section, in order, written once all
of the section's shards exist.

    <prepared data>/sections/000000.json    like manifest.json, for the shards that section 0 needs

manifest.json replaces them when everything is prepared.
"""

from __future__ import annotations

import dataclasses

from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, PreparedSource

SUMMED = ("tokens", "documents", "bytes", "inner_ends")
"""Manifest fields that are summed over sections."""


class StoppedWaiting(Exception):
    """The process was asked to stop while it waited for data."""


def section_name(number: int) -> str:
    """Return the file name of section `number`."""
    return f"sections/{number:06d}.json"


def publish(folder: DataFolder, number: int, section: DataManifest) -> None:
    """Publish the shards of a section."""
    manifest.write(folder, section, section_name(number))


def read_section(folder: DataFolder, number: int) -> DataManifest | None:
    """Return the shards of a section; None if they are not complete yet. Raises InputError as `manifest.read`."""
    return manifest.read(folder, section_name(number))


def joined(before: DataManifest, section: DataManifest) -> DataManifest:
    """Return the data up to and including a section: its shards follow those before."""
    sources = tuple(
        PreparedSource(earlier.uri, (*earlier.shards, *later.shards))
        for earlier, later in zip(before.sources, section.sources, strict=True)
    )
    sums = {name: getattr(before, name) + getattr(section, name) for name in SUMMED}
    return dataclasses.replace(before, sources=sources, **sums)


def so_far(folder: DataFolder) -> tuple[DataManifest, int] | None:
    """Return the published data and its number of sections; None before the first section."""
    manifest_so_far = read_section(folder, 0)
    number = 1
    if manifest_so_far is None:
        return None
    while more := read_section(folder, number):
        manifest_so_far = joined(manifest_so_far, more)
        number = number + 1
    return manifest_so_far, number


def read(folder: DataFolder) -> DataManifest | None:
    """Return the manifest of prepared data, complete or as far as published; None without any."""
    if complete := manifest.read(folder):
        return complete
    published = so_far(folder)
    return published[0] if published else None
