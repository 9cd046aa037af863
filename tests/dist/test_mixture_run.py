"""Runs over mixed sources whose documents are packed whole: kills and other widths change no sample and no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights
from local_run import LocalGang, controller_here, drive_here

pytestmark = pytest.mark.slow
STEPS = 16


def documents(folder: Path) -> list[str]:
    """Two sources of real text, with documents of many lengths."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in (0, 1):
        found = [text[: 40 + 37 * n] for n, text in enumerate(map(topics.get, sorted(topics)[number::2]))]
        path = folder / f"{number}.txt"
        path.write_text("\n<|endoftext|>\n".join(found[: 12 + 20 * number]))
        paths.append(str(path))
    return paths


def mixed(folder: Path, **train: Any) -> dict[str, Any]:
    paths = documents(folder)
    document = job(paths[0], steps=STEPS, **train)
    phases = [{"until": 7, "shares": [0.25, 0.75]}, {"shares": [0.6, 0.4]}]
    document["data"]["sources"] = [{"uri": path} for path in paths]
    document["data"] |= {"packing": "best_fit", "mixture": {"phases": phases}}
    document["workload"] |= {"options": {"documents": "isolate"}, "dropout": 0.1}
    document["checkpoint"] = {"every": 4, "keep": 9, "export": None}
    return document


@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_at_another_width_with_its_quiet_twins_bits(tmp_path: Path) -> None:
    """Asked for in ray#48224 and ray#37633."""
    document = mixed(tmp_path / "text", determinism="bitwise")
    document["train"]["sequence_warmup"] = {"length": 8, "steps": 9}
    document["resources"]["workers"] = {"min": 1, "max": 4}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    drive_here(dict(document), str(quiet), tmp_path / "cache", gang=lambda: LocalGang([1]))
    faults = ("kill@1:6", "kill@0:11/2")
    drive_here(
        dict(document), str(killed), tmp_path / "cache", gang=lambda: LocalGang([2, 4, 1]), faults=faults
    )
    died = [event["first_fault"] for event in rows(killed, "events.jsonl") if event["first_fault"]]
    assert len(died) == 2
    assert [str(row["layout"]).split()[0] for row in rows(killed)] != [rows(quiet)[0]["layout"]] * STEPS
    assert curve(killed) == curve(quiet)
    assert weights(killed, STEPS) == weights(quiet, STEPS)
    assert {row["samples"] for row in rows(killed)} == {row["samples"] for row in rows(quiet)}
    assert [row["sequence_length"] for row in rows(quiet)] == [8] * 5 + [16] * 4 + [32] * 7
    assert [row["tokens"] for row in rows(quiet)] == [8 * 32 * step for step in range(1, STEPS + 1)]
    assert all(0.0 <= row["padding"] < 0.5 for row in rows(quiet))


@pytest.mark.timeout(900)
def test_isolated_documents_are_the_same_under_every_layout(tmp_path: Path) -> None:
    document = mixed(tmp_path / "text")
    losses = {}
    for layout in ({}, {"tp": 2}, {"pp": 2, "micro_batch": 2}, {"cp": 2}, {"zero": 2}):
        run = tmp_path / ("-".join(layout) or "alone")
        count = 2 if layout else 1
        document["parallel"] = layout or {"micro_batch": 4}
        document["resources"]["workers"] = {"min": count, "max": count}
        drive_here(dict(document), str(run), tmp_path / "cache", gang=lambda count=count: LocalGang([count]))
        losses[str(layout)] = [row["loss"] for row in rows(run)]
    for found in losses.values():
        assert found == pytest.approx(losses["{}"], abs=2e-5)


@pytest.mark.timeout(900)
def test_a_damaged_index_is_noticed_and_made_again(tmp_path: Path) -> None:
    document, cache = mixed(tmp_path / "text"), tmp_path / "cache"
    quiet, hurt = tmp_path / "quiet", tmp_path / "hurt"
    drive_here(dict(document), str(quiet), cache, gang=lambda: LocalGang([2]))
    controller_here(dict(document), str(hurt), cache, gang=lambda: LocalGang([2]), until=5).drive()
    for path in cache.glob("*/packing/*/*.pieces"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    drive_here(dict(document), str(hurt), cache, gang=lambda: LocalGang([2, 2, 2]))
    assert curve(hurt) == curve(quiet)
    assert weights(hurt, STEPS) == weights(quiet, STEPS)
    assert list(cache.glob("*/packing/*/*.damaged"))
