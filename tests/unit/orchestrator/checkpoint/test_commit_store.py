from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CorruptCommit, parse_manifest
from orchestrator.checkpoint.pieces import DTYPES, TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention, discard, prune, rewind
from orchestrator.config.errors import InputError

META = {"position": 640, "receipt": "abc", "layout": {"tp": 2}, "loss": 1.5}


@pytest.fixture(params=["local", "memory"])
def uri(request: pytest.FixtureRequest, in_memory: Path) -> str:
    return (
        f"memory://{uuid.uuid4().hex}/run"
        if request.param == "memory"
        else str(in_memory / "run" / "checkpoints")
    )


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.w": torch.randn(8, 6),
        "model.b": torch.randn(6).bfloat16(),
        "optim.w.exp_avg": torch.randn(8, 6),
        "optim.w.step": torch.tensor(float(seed)),
        "model.none": torch.empty(0, 4),
    }


def commit(store: Store, step: int, seed: int | None = None, **meta: object) -> dict[str, torch.Tensor]:
    """Two writers: the matrices by halves, the rest by the first."""
    held = state(step if seed is None else seed)
    first, second = [], []
    for name, tensor in held.items():
        if tensor.dim() == 2 and len(tensor):
            first.append(TensorPiece(name, (8, 6), (0, 0), tensor[:3]))
            second.append(TensorPiece(name, (8, 6), (3, 0), tensor[3:]))
        else:
            first.append(full_piece(name, tensor))
    records = store.write_shard(step, 0, first) + store.write_shard(step, 7, second)
    store.publish(step, json.loads(json.dumps(records)), META | meta)
    return held


def restored(store: Store, at_most: int | None = None) -> dict[str, torch.Tensor]:
    manifest = store.latest(at_most)
    assert manifest is not None
    reader = store.reader(manifest)
    return {name: reader.read(name) for name in manifest.tensors}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_what_is_committed_is_what_is_read(uri: str) -> None:
    store = Store(uri)
    assert store.latest() is None
    held = commit(store, 20)
    manifest = Store(uri).latest()
    assert manifest is not None
    assert (manifest.step, manifest.position, manifest.receipt) == (20, 640, "abc")
    assert manifest.meta == {"layout": {"tp": 2}, "loss": 1.5}
    assert same(restored(Store(uri)), held)
    assert store.steps() == [20]
    assert store.verify(20) == []


def test_every_dtype_comes_back(uri: str) -> None:
    store = Store(uri)
    held = {f"model.{name}": (torch.arange(6) % 2).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    store.publish(1, store.write_shard(1, 0, [full_piece(*item) for item in held.items()]), META)
    read = restored(store)
    assert all(read[name].dtype == tensor.dtype for name, tensor in held.items())
    assert all(torch.equal(read[n].view(torch.uint8), held[n].view(torch.uint8)) for n in held)


def test_shards_are_safetensors_files(in_memory: Path) -> None:
    store = Store(str(in_memory))
    held = commit(store, 20)
    read = {}
    for file in (in_memory / "step-00000020").glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            read |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118
    assert torch.equal(read["model.w@3,0"], held["model.w"][3:])
    assert torch.equal(read["optim.w.step@"], held["optim.w.step"])
    assert torch.equal(read["model.b@0"], held["model.b"])


def test_a_large_shard_is_several_files(uri: str) -> None:
    store = Store(uri, file_bytes=100)
    held = commit(store, 3)
    manifest = store.latest()
    assert manifest is not None
    assert len(manifest.files) == 4
    assert same(restored(store), held)


@pytest.mark.parametrize("target", ["manifest", "header", "first byte", "last byte"])
def test_a_flipped_bit_is_found_and_the_commit_before_is_used(in_memory: Path, target: str) -> None:
    store = Store(str(in_memory))
    held = commit(store, 10)
    commit(store, 20)
    folder = in_memory / "step-00000020"
    path = folder / "manifest.json" if target == "manifest" else next(folder.glob("shard-00000*"))
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little") if target != "manifest" else 0
    data[{"manifest": 30, "header": 12, "first byte": header, "last byte": -1}[target]] ^= 4
    path.write_bytes(data)
    assert len(store.verify(20)) == 1
    assert same(restored(store), held)
    assert [step for step, _ in store.skipped] == [20]


def test_every_bit_of_a_manifest_counts(in_memory: Path) -> None:
    store = Store(str(in_memory))
    commit(store, 1)
    raw = store.manifest(1).to_bytes()
    for at in range(0, len(raw) * 8, 7):
        data = bytearray(raw)
        data[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptCommit):
            parse_manifest(bytes(data), "")


@pytest.mark.parametrize("harm", ["cut", "longer", "missing"])
def test_a_cut_longer_or_missing_shard_is_found(in_memory: Path, harm: str) -> None:
    store = Store(str(in_memory))
    held = commit(store, 10)
    commit(store, 20)
    path = next((in_memory / "step-00000020").glob("shard-00007*"))
    if harm == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (1 if harm == "longer" else -1))
    assert any(path.name in line for line in store.verify(20))
    assert same(restored(store), held)
    assert store.latest(deep=False).step == 10  # type: ignore[union-attr]


def test_reading_damage_raises(in_memory: Path) -> None:
    store = Store(str(in_memory))
    commit(store, 10)
    path = next((in_memory / "step-00000010").glob("shard-00007*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = store.reader(store.manifest(10))
    reader.read("model.w", (0, 0), (3, 6))
    with pytest.raises(CorruptCommit, match=r"optim\.w\.exp_avg: block 0 .* damaged"):
        reader.read("optim.w.exp_avg")


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([TensorPiece("model.w", (4,), (0,), torch.zeros(3))], "3 of 4"),
        ([TensorPiece("model.w", (4,), (2,), torch.zeros(3))], "outside"),
        (
            [
                TensorPiece("model.w", (4,), (0,), torch.zeros(4)),
                TensorPiece("model.w", (4,), (1,), torch.zeros(2)),
            ],
            "overlap",
        ),
        (
            [
                TensorPiece("model.w", (2, 2), (0, 0), torch.zeros(2, 1)),
                TensorPiece("model.w", (2, 2), (1, 0), torch.zeros(1, 2)),
            ],
            "overlap",
        ),
        (
            [
                TensorPiece("model.w", (2,), (0,), torch.zeros(1)),
                TensorPiece("model.w", (3,), (1,), torch.zeros(1)),
            ],
            "disagree",
        ),
    ],
)
def test_chunks_that_do_not_tile_are_refused(uri: str, pieces: list[TensorPiece], words: str) -> None:
    store = Store(uri)
    records = [
        record for shard, piece in enumerate(pieces) for record in store.write_shard(1, shard, [piece])
    ]
    with pytest.raises(InputError, match=words):
        store.publish(1, records, META)
    assert store.latest() is None


def test_a_published_step_is_never_overwritten(uri: str) -> None:
    store = Store(uri)
    held = commit(store, 5)
    with pytest.raises(InputError, match="committed already"):
        commit(store, 5, seed=99)
    assert same(restored(store), held)
    assert rewind(store, 4) == [5]
    assert same(commit(store, 5, seed=99), restored(store))


def test_a_damaged_commit_gives_way(in_memory: Path) -> None:
    store = Store(str(in_memory))
    commit(store, 5)
    next((in_memory / "step-00000005").glob("shard-00000*")).unlink()
    assert same(commit(store, 5, seed=6), restored(store))


def test_a_late_writer_of_a_dead_attempt_changes_nothing(uri: str) -> None:
    """Nor does what it left of a step that another rank never finished. Asked for in ray#41700."""
    dead, alive = Store(uri), Store(uri)
    dead.write_shard(5, 0, [full_piece("model.w", torch.zeros(8, 6))])
    assert alive.steps() == []
    held = commit(alive, 5)
    late = dead.write_shard(5, 0, [full_piece("model.w", torch.ones(8, 6))])
    with pytest.raises(InputError, match="committed already"):
        dead.publish(5, late, META)
    assert same(restored(alive), held)
    prune(alive, Retention(keep=1))
    assert len(alive.backend.list("step-00000005")) == 3
    assert same(restored(alive), held)


def of_attempt(store: Store, step: int, number: int | None, value: float = 0.0) -> None:
    meta = META if number is None else {**META, "attempt": number}
    store.publish(step, store.write_shard(step, 0, [full_piece("model.w", torch.full((8, 6), value))]), meta)


def test_an_attempt_that_was_overtaken_commits_nothing(uri: str) -> None:
    """Its gang may be at work behind a cut network and still reach the store. Asked for in kuberay#5211."""
    old, new = Store(uri), Store(uri)
    of_attempt(old, 4, 1)
    new.fence(2)
    with pytest.raises(InputError, match="step-00000008: attempt 2 has taken over"):
        of_attempt(old, 8, 1)
    assert new.steps() == [4]
    of_attempt(new, 8, 2, value=2.0)
    with pytest.raises(InputError, match="attempt 2 has taken over"):
        of_attempt(old, 8, 1)
    assert restored(new)["model.w"].unique().tolist() == [2.0]
    of_attempt(new, 12, 3)
    of_attempt(new, 16, None)  # what is no attempt of a run
    assert new.steps() == [4, 8, 12, 16]


def test_what_an_overtaken_attempt_published_at_the_last_moment_gives_way(uri: str) -> None:
    old, new = Store(uri), Store(uri)
    rewind(new, 4)
    of_attempt(old, 8, 1)
    new.fence(2)
    of_attempt(new, 8, 2, value=2.0)
    assert restored(new)["model.w"].unique().tolist() == [2.0]
    with pytest.raises(InputError, match="committed already"):
        of_attempt(new, 8, 2, value=3.0)


def test_prune_keeps_last_every_best_and_removes_half_commits(uri: str) -> None:
    store = Store(uri)
    for step, loss in zip(range(10, 80, 10), [9, 1, 8, 7, 6, 5, 4], strict=True):
        commit(store, step, loss=loss)
    store.write_shard(35, 0, [full_piece("model.w", torch.zeros(2))])
    store.write_shard(75, 0, [full_piece("model.w", torch.zeros(2))])
    assert prune(store, Retention(keep=2, every=30, best="")) == [10, 40, 50]
    assert store.steps() == [20, 30, 60, 70]
    left = store.backend.list()
    assert not any("step-00000035" in path for path in left)
    assert any("step-00000075" in path for path in left)


def test_commits_that_were_not_rated_are_not_the_best(uri: str) -> None:
    store = Store(uri)
    for step, loss in [(1, None), (2, 3.0), (3, 2.0), (4, 2.5), (5, None)]:
        commit(store, step, loss=loss)
    assert prune(store, Retention(keep=1, best="")) == [1, 2, 4]
    assert prune(store, Retention(keep=1)) == [3]


def test_the_newest_commit_that_is_verified_stays(uri: str) -> None:
    store = Store(uri)
    for step, verified in [(10, 0), (20, 20), (30, 20), (50, 40)]:
        commit(store, step, verified=verified)
    assert prune(store, Retention(keep=1)) == [10, 20], "30 is the newest up to the last verified step, 40"
    commit(store, 60, verified=0)
    assert prune(store, Retention(keep=1)) == [30, 50], "a run that verifies nothing keeps nothing for it"


def test_the_newest_sound_commit_before_a_step_stays(uri: str) -> None:
    store = Store(uri)
    for step in (10, 20, 30):
        commit(store, step)
    # Nothing is after that step yet: what is newest is what it is about.
    assert prune(store, Retention(keep=1, before=30)) == [10, 20]
    for step in (35, 40, 50):
        commit(store, step)
    assert prune(store, Retention(keep=1, before=35)) == [30, 40]
    assert prune(store, Retention(keep=1, before=34)) == [35]


def test_prune_does_not_count_damaged_commits(in_memory: Path) -> None:
    store = Store(str(in_memory))
    held = commit(store, 10)
    commit(store, 20)
    next((in_memory / "step-00000020").glob("shard-00000*")).unlink()
    assert prune(store, Retention(keep=1)) == []
    assert same(restored(store), held)


def test_at_most_and_discard(uri: str) -> None:
    store = Store(uri)
    first = commit(store, 1)
    commit(store, 2)
    assert same(restored(store, at_most=1), first)
    store.write_shard(3, 0, [full_piece("model.w", torch.zeros(2))])
    discard(store, 3)
    discard(store, 2)
    assert store.steps() == [1, 2]
    assert not any("step-00000003" in path for path in store.backend.list())


def test_a_commit_that_is_removed_while_the_newest_is_looked_for(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run at work keeps one commit: between the list of them and the look at it, the next has taken its place."""
    store = Store(uri)
    commit(store, 4)
    listed = store.backend.list

    def list_before_the_next(folder: str = "") -> dict[str, int]:
        monkeypatch.setattr(store.backend, "list", listed)
        found = listed(folder)
        commit(store, 8)
        prune(store, Retention(1))
        return found

    monkeypatch.setattr(store.backend, "list", list_before_the_next)
    newest = store.latest()
    assert newest is not None
    assert newest.step == 8


def test_a_commit_that_was_moved_with_a_link_in_its_place_is_one_of_the_run(tmp_path: Path) -> None:
    store, away = Store(str(tmp_path / "run")), tmp_path / "away"
    for step in (4, 8, 12):
        commit(store, step)
    away.mkdir()
    for name in ("step-00000004", "step-00000008"):
        (tmp_path / "run" / name).rename(away / name)
        (tmp_path / "run" / name).symlink_to(away / name)
    (away / "step-00000008" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "round").symlink_to(tmp_path / "run")
    assert store.steps() == [4, 8, 12]
    newest = store.latest(8)
    assert newest is not None
    assert newest.step == 8
    assert same(restored(store, 8), state(8))
    assert prune(store, Retention(1)) == [4, 8]
    assert not (tmp_path / "run" / "step-00000004").is_symlink()
    assert list((away / "step-00000004").iterdir()) == []
    assert [path.name for path in (tmp_path / "run" / "step-00000008").iterdir()] == ["notes.txt"]


def test_meta_must_hold_position_and_receipt(uri: str) -> None:
    """The position is part of a commit, as torchft#309 and torchtitan#4686 ask for."""
    with pytest.raises(InputError, match="receipt"):
        Store(uri).publish(1, [], {"position": 1})
