"""Runs that begin before their data is prepared: the samples, bits and receipts of those whose data was complete."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from base_run import save_dense
from jobs import curve, job, rows, weights, write_text
from letters import WORDS, letters, write_tokenizer
from local_run import LocalGang
from scripted import SnapshotServers

from cluster.workers.cluster import Cluster
from cluster.workers.machine import Offer
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller.controller import Controller
from orchestrator.data import sources
from orchestrator.data.prepare import part_tasks
from orchestrator.storage.run_directory import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 90
"""More than an epoch."""


class Tasks:
    """In the place of tasks of Ray, in this process: each begins when `may_begin` says so of what was done before."""

    def __init__(self, may_begin: Callable[[int], bool] = lambda done: True) -> None:
        self.may_begin, self.done, self.ended = may_begin, 0, False

    def run(self, task: Any, given: list[dict[str, Any]], cache: str, **_: Any) -> Iterator[int]:
        for done, row in enumerate(given, 1):
            while not self.may_begin(self.done):
                time.sleep(0.05)
                if self.ended:
                    raise InputError("has ended", "the test")
            part_tasks.raise_error(part_tasks.run_task(task, cache, row))
            self.done += 1
            yield done

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(part_tasks, "run_tasks", self.run)
        monkeypatch.setattr(
            part_tasks, "run_alone", lambda task, cache, *arguments, **keywords: task(*arguments, **keywords)
        )
        monkeypatch.setattr(sources, "part_size", lambda files: 4_000)


def document(tmp_path: Path, streaming: bool, kind: str = "passes") -> dict[str, Any]:
    found = job(write_text(tmp_path / "text", 60_000), steps=STEPS, determinism="bitwise")
    other = tmp_path / "text" / "other.txt"
    other.write_text("\n".join(f"line {number} of another source" for number in range(300)))
    found["data"]["sources"].append({"uri": str(other), "weight": 2})
    if kind == "mixture":
        found["data"]["sources"] = [
            {"uri": source["uri"], "share": share, "max_passes": 4}
            for source, share in zip(found["data"]["sources"], (0.9, 0.1), strict=True)
        ]
    if kind in ("documents", "pairs"):
        for path in (tmp_path / "text").iterdir():
            lines = path.read_text().splitlines()
            texts = ["\n".join(lines[at : at + 9]) for at in range(0, len(lines), 9)]
            path.write_text("\n<|endoftext|>\n".join(texts))
        for source in found["data"]["sources"]:
            source.pop("weight", None)
        found["data"] |= {"mixture": {"alpha": 0.5}, "validation": {"share": 0.2}}
        found["evaluate"] = {"every": 15}
    if kind == "documents":
        found["data"]["packing"] = "best_fit"
    if kind == "pairs":
        found["workload"] |= {"model": "bert-tiny", "objective": "next_sentence"}
    if kind == "preferences":
        prefer(found, tmp_path)
    found["data"] |= {"streaming": True} if streaming else {"shuffle": "sections"}
    found["checkpoint"] |= {"every": 5, "keep": 40}
    return found


def prefer(found: dict[str, Any], folder: Path) -> None:
    """Have a job learn preferences over what a class of transformers begins with."""
    if not (folder / "text" / "rows.jsonl").exists():
        save_dense(folder / "base", len(WORDS))
        write_tokenizer(folder / "base")
        rows = [
            {"prompt": letters(n), "chosen": letters(n + 1), "rejected": letters(n + 1)[::-1]}
            for n in range(3000)
        ]
        (folder / "text" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found["workload"] = {"model": f"hf:{folder / 'base'}", "objective": "dpo"}
    columns = {name: name for name in ("prompt", "chosen", "rejected")}
    found["data"] = {
        "sources": [{"uri": str(folder / "text" / "rows.jsonl"), "field": columns}],
        "tokenizer": str(folder / "base"), "sequence_length": 48, "validation": {"share": 0.05},
    }  # fmt: skip
    found["train"]["reference"] = "held"
    found["evaluate"] = {"every": 15}


def controller(
    given: dict[str, Any],
    run: Path,
    cache: Path,
    rooms: list[int],
    faults: tuple[str, ...] = (),
    until: int = STEPS,
) -> Controller:
    given["data"]["cache"] = str(cache)
    place = RunDir(str(run))
    place.create()
    cluster = Cluster(
        gang=lambda: LocalGang(rooms),
        offer=lambda bundle, most: Offer(8e9),
        run_task=lambda *call, **_: pytest.fail("nothing is exported"),
        services=SnapshotServers,
    )
    return Controller(parse(given), place, until, cluster, faults)


def steps_of(run: Path) -> int:
    if not (run / "metrics.jsonl").exists():
        return 0
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]  # the last may be being written
    return max((json.loads(line)["step"] for line in whole), default=0)


def manifests(cache: Path) -> list[Path]:
    return list(cache.glob("*/manifest.json"))


def evaluations(run: Path) -> dict[int, Any]:
    """What was measured on the held-out sets, by step."""
    found = rows(run, "evals.jsonl") if (run / "evals.jsonl").exists() else []
    return {
        row["step"]: {
            name: {k: v for k, v in each.items() if "second" not in k} for name, each in row["sets"].items()
        }
        for row in found
    }


@pytest.mark.parametrize("kind", ["passes", "mixture", "documents", "pairs", "preferences"])
def test_it_trains_while_data_is_prepared_as_if_all_were_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are packed, too: asked for in ms-swift#4505."""
    quiet, streamed, killed = (tmp_path / name for name in ("quiet", "streamed", "killed"))
    # of a small source much is read soon
    early, soon = (8, 11) if kind in ("documents", "pairs", "preferences") else (12, 20)
    Tasks().use(monkeypatch)
    controller(document(tmp_path, False, kind), quiet, tmp_path / "whole", [2]).drive()
    plan = json.loads(next((tmp_path / "whole").glob("*/plan.json")).read_text())
    every = sum(plan["parts"])
    assert every > 15

    # the last part begins when what was published before it is used up
    late = Tasks(lambda done: done < every - 1 or steps_of(streamed) >= 2 * soon)
    late.use(monkeypatch)
    controller(document(tmp_path, True, kind), streamed, tmp_path / "cache", [2]).drive()
    assert curve(streamed) == curve(quiet)
    assert [row["samples"] for row in rows(streamed)] == [row["samples"] for row in rows(quiet)]
    assert weights(streamed, STEPS) == weights(quiet, STEPS)
    assert evaluations(streamed) == evaluations(quiet)
    assert bool(evaluations(quiet)) == (kind in ("documents", "pairs", "preferences"))
    (one,), (other,) = manifests(tmp_path / "whole"), manifests(tmp_path / "cache")
    assert one.read_bytes() == other.read_bytes()

    # killed ranks, another width, and a controller that ends while parts are missing
    slow = Tasks(lambda done: done < every // 2 or steps_of(killed) > early)
    slow.use(monkeypatch)
    first = controller(
        document(tmp_path, True, kind), killed, tmp_path / "third", [2, 1], ("kill@1:4",), until=early
    )
    first.drive()
    slow.ended = True
    assert not manifests(tmp_path / "third")
    rest = Tasks(lambda done: done < 3 or steps_of(killed) >= soon)
    rest.use(monkeypatch)
    controller(document(tmp_path, True, kind), killed, tmp_path / "third", [1, 2], ("kill@0:31",)).drive()
    assert curve(killed) == curve(quiet)
    assert {row["samples"] for row in rows(killed)} == {row["samples"] for row in rows(quiet)}
    assert weights(killed, STEPS) == weights(quiet, STEPS)
    assert evaluations(killed) == evaluations(quiet)


def test_a_stop_while_ranks_wait_for_data_ends_with_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    tasks = Tasks(lambda done: done < 6)
    tasks.use(monkeypatch)
    found = controller(document(tmp_path, True), run, tmp_path / "cache", [2])

    def stop() -> None:
        last, since = -1, time.monotonic()
        while time.monotonic() - since < 4 or last < 1:  # no step for a while: they wait
            if (now := steps_of(run)) != last:
                last, since = now, time.monotonic()
            time.sleep(0.1)
        found.request_stop("asked for")

    threading.Thread(target=stop, daemon=True).start()
    summary = found.drive()
    tasks.ended = True
    assert summary["state"] == "stopped"
    done = steps_of(run)
    assert 0 < done < STEPS
    assert (run / "checkpoints").exists()
    assert any(
        f"{done:08d}" in path.name or str(done) in path.name for path in (run / "checkpoints").iterdir()
    )


def test_a_preparation_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    def fail(done: int) -> bool:
        if done > 5 and steps_of(run) >= 2:
            raise InputError("is damaged", "part 6")
        return done <= 5

    Tasks(fail).use(monkeypatch)
    with pytest.raises(InputError, match="part 6"):
        controller(document(tmp_path, True), run, tmp_path / "cache", [2]).drive()
    last = steps_of(run)
    assert 0 < last < STEPS
    assert any(path.name.endswith(f"{last:08d}") for path in (run / "checkpoints").iterdir())
    assert rows(run, "events.jsonl")[-1]["phase"] == "failed"


def test_what_is_damaged_or_gone_while_it_trains_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, run = tmp_path / "quiet", tmp_path / "run"
    Tasks().use(monkeypatch)
    controller(document(tmp_path, False, "documents"), quiet, tmp_path / "whole", [2]).drive()
    struck: list[str] = []

    def strike(done: int) -> bool:
        """After the second step: a byte of a shard that is published and not read yet, and the text of the rest."""
        if done > 9 and steps_of(run) >= 2 and not struck:
            shard = next((tmp_path / "cache").glob("*/shards/000005.bin"))
            shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
            text = tmp_path / "text" / "topics.txt"
            text.rename(text.with_suffix(".away"))
            struck.append(str(shard))
        return done <= 9 or bool(struck)

    Tasks(strike).use(monkeypatch)
    with pytest.raises(InputError, match=r"topics\.txt"):
        controller(document(tmp_path, True, "documents"), run, tmp_path / "cache", [2]).drive()
    assert struck
    assert steps_of(run) < STEPS
    Tasks().use(monkeypatch)
    controller(
        document(tmp_path, True, "documents"), run, tmp_path / "cache", [2, 2]
    ).drive()  # writes it anew
    assert curve(run) == curve(quiet)
    assert evaluations(run) == evaluations(quiet)
    assert weights(run, STEPS) == weights(quiet, STEPS)
    assert [path.name for path in (tmp_path / "cache").glob("*/shards/*.damaged")] == ["000005.bin.damaged"]
