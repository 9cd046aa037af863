"""Prepared data whose sections are published one by one, as they are while it is prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator.data.samples.sections import published
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder


def plan_of(uri: str) -> SectionPlan:
    """The plan of prepared data of which every part has text."""
    whole = manifest.read(DataFolder(uri))
    assert whole is not None
    sizes = [[shard.bytes for shard in source.shards] for source in whole.sources]
    plan = SectionPlan(tuple(map(len, sizes)))
    needed = zip(sizes, plan.needed(0), strict=True)
    return replace(plan, bytes=tuple((sum(source[:parts]), sum(source)) for source, parts in needed))


def unpublished(uri: str) -> Callable[[int], None]:
    """Take back the manifest of prepared data; what publishes a section of it."""
    folder, plan = DataFolder(uri), plan_of(uri)
    whole = manifest.read(folder)
    assert whole is not None
    Path(folder.at(manifest.NAME)).unlink()

    def publish(section: int) -> None:
        parts = plan.numbers(section)
        sources = tuple(
            replace(s, shards=tuple(shard for shard in s.shards if int(Path(shard.file).stem) in parts))
            for s in whole.sources
        )
        sums = {
            name: sum(getattr(shard, name) for source in sources for shard in source.shards)
            for name in ("tokens", "documents", "bytes")
        }
        published.publish(folder, section, replace(whole, sources=sources, **sums))

    return publish
