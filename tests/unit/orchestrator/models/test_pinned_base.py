"""A run that begins with the weights of another's commit holds it, for that one may be at work and remove it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import BASE
from orchestrator.checkpoint.pins import holders
from orchestrator.checkpoint.retention import Retention, prune, remove
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.models.base import Base, base_json, base_of
from orchestrator.models.pinned_base import bases_of, read_base, release_base, unpinned_notes
from orchestrator.storage.run_directory import RunDir

ADAPTER = {"kind": "lora", "rank": 4, "targets": "*.attention.*"}


def job(**workload: Any) -> JobSpec:
    return parse({
        "name": "tuned",
        "workload": {"model": "gpt-tiny", **workload},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": 24},
        "train": {"steps": 10, "global_batch": 8},
    })  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """That of a run at work, whose newest commit is at step 4."""
    store = Store(str(tmp_path / "base" / "checkpoints"))
    commit(store, 4)
    return store


@pytest.fixture
def ours(tmp_path: Path) -> RunDir:
    return RunDir(str(tmp_path / "tuned"))


def uri(store: Store) -> str:
    return store.uri.removesuffix("/checkpoints")


def commit(store: Store, step: int) -> list[int]:
    """Commit a step, as a run with `checkpoint.keep: 1`; the steps that are removed."""
    store.publish(step, store.write_shard(step, 0, []), {"position": 0, "receipt": ""})
    return prune(store, Retention(keep=1))


def test_an_adapter_holds_what_it_is_for_for_good(store: Store, ours: RunDir) -> None:
    spec = job(init_from=uri(store), adapter=ADAPTER)
    base, needed = bases_of(
        workload=spec.workload,
        reads_base=spec.reads_base,
        needs_base=spec.needs_base,
        recorded={},
        commit=None,
        run=ours,
    )
    assert base is not None
    assert (needed, unpinned_notes(base, None, ours)) == (base, [])
    assert commit(store, 8) == []
    release_base(spec.needs_base, ours, base_json(base) or {})
    assert commit(store, 12) == [8]
    assert base_of(spec.workload, spec.needs_base, base_json(base) or {}, True) == base
    assert holders(store, 4) == [f"the run {ours.uri}"]


def test_a_run_that_trains_all_weights_lets_go_when_it_is_done(store: Store, ours: RunDir) -> None:
    spec = job(init_from=uri(store))
    base, _ = bases_of(
        workload=spec.workload,
        reads_base=spec.reads_base,
        needs_base=spec.needs_base,
        recorded={},
        commit=None,
        run=ours,
    )
    assert base is not None
    assert commit(store, 8) == []
    release_base(spec.needs_base, ours, base_json(base) or {})
    assert commit(store, 12) == [4, 8]
    assert bases_of(
        workload=spec.workload,
        reads_base=spec.reads_base,
        needs_base=spec.needs_base,
        recorded=base_json(base) or {},
        commit=store.manifest(12),
        run=ours,
    ) == (base, None)


def test_a_newer_commit_is_taken_where_the_newest_is_removed_just_now(store: Store) -> None:
    def read(base: Base | None) -> int | None:
        assert base is not None
        if base.step == 4:
            commit(store, 8)
            remove(store, 4, store.backend.list())
            raise InputError("there is no commit")
        return base.step

    assert read_base((asked := job(init_from=uri(store))).workload, asked.needs_base, {}, False, read) == 8


def test_one_that_is_named_is_told_to_be_gone(store: Store) -> None:
    def read(_: Base | None) -> None:
        commit(store, 8)
        remove(store, 4, store.backend.list())
        raise InputError("there is no commit")

    with pytest.raises(InputError, match=r"workload.init_from: .* has no commit at 4; name a step of \[8\]"):
        read_base(
            (asked := job(init_from=f"{uri(store)}@4")).workload,
            asked.needs_base,
            {},
            False,
            read,
        )


def test_a_base_where_nothing_may_be_written_is_told(
    store: Store, ours: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: Any) -> None:
        raise PermissionError("held")

    monkeypatch.setattr("orchestrator.storage.posix_backend.PosixBackend.replace", refuse)
    base, _ = bases_of(
        workload=(asked := job(init_from=uri(store), adapter=ADAPTER)).workload,
        reads_base=asked.reads_base,
        needs_base=asked.needs_base,
        recorded={},
        commit=None,
        run=ours,
    )
    (line,) = unpinned_notes(base, None, ours)
    assert line.startswith(f"{uri(store)}@4 is needed but cannot be pinned")


def test_a_phase_that_goes_on_from_an_adapter_has_the_same_base(store: Store, ours: RunDir) -> None:
    """Not the newest of a base that has trained on."""
    spec = job(init_from=uri(store), adapter=ADAPTER)
    base, _ = bases_of(
        workload=spec.workload,
        reads_base=spec.reads_base,
        needs_base=spec.needs_base,
        recorded={},
        commit=None,
        run=RunDir(f"{ours.uri}-before"),
    )
    commit(store, 8)
    first = Store(ours.commits)
    first.publish(2, first.write_shard(2, 0, []), {"position": 0, "receipt": "", BASE: base_json(base)})
    assert bases_of(
        workload=spec.workload,
        reads_base=spec.reads_base,
        needs_base=spec.needs_base,
        recorded={},
        commit=first.manifest(2),
        run=ours,
    ) == (base, base)
    assert len(holders(store, 4)) == 2
