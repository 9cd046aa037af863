from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.checkpoint.saver import Saver
from orchestrator.config.errors import InputError
from orchestrator.storage import file_system
from orchestrator.storage.retry import Retry

META = {"position": 1, "receipt": "r"}
PATIENT = Retry(attempts=12, first=0.02, cap=0.2)


def opened(uri: str, **options: Any) -> Store:
    return Store(f"{uri}/run/checkpoints", **{"retry": PATIENT, "timeout": 1.0} | options)


def commit(store: Store, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tensor = torch.randn(64, 100, generator=generator)
    pieces = [
        TensorPiece("model.w", (64, 100), (32 * half, 0), tensor[32 * half : 32 * half + 32])
        for half in (0, 1)
    ]
    records = [
        record for half, piece in enumerate(pieces) for record in store.write_shard(step, half, [piece])
    ]
    store.publish(step, records, META)
    return tensor


def restored(store: Store) -> tuple[int, torch.Tensor]:
    found = store.latest()
    assert found is not None
    return found.step, store.reader(found).read("model.w")


def test_commit_restore_prune(bucket: str) -> None:
    store = opened(bucket)
    assert store.latest() is None
    for step in (1, 2, 3):
        tensor = commit(store, step)
    step, read = restored(opened(bucket))
    assert step == 3
    assert torch.equal(read, tensor)
    assert store.verify(3) == []
    assert prune(store, Retention(keep=1)) == [1, 2]
    assert store.steps() == [3]
    assert {path.split("/")[0] for path in store.backend.list()} == {"LATEST", "step-00000003"}


@pytest.mark.parametrize(
    "fault",
    [
        "busy",
        "cut",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("refuse", "deaf", "hang", "slow")),
    ],
)
def test_faults_pass(bucket: str, proxy: Any, fault: str) -> None:
    count, every = itertools.count(1), 8 if fault == "hang" else 3
    proxy.spoil = lambda line: fault if next(count) % every == 0 else ""
    store = opened(bucket)
    for step in (1, 2):
        tensor = commit(store, step)
    step, read = restored(store)
    assert (step, torch.equal(read, tensor)) == (2, True)
    prune(store, Retention(keep=1))
    proxy.spoil = lambda line: ""
    assert opened(bucket).steps() == [2]
    assert len(proxy.spoiled) >= 2


def test_a_publication_whose_answer_is_lost_counts(bucket: str, proxy: Any) -> None:
    lost = iter(["deaf", "deaf"])
    proxy.spoil = lambda line: next(lost, "") if line.startswith("PUT") and "manifest.json" in line else ""
    tensor = commit(opened(bucket), 1)
    assert [line.split()[0] for line in proxy.spoiled] == ["deaf", "deaf"]
    assert torch.equal(restored(opened(bucket))[1], tensor)


def test_one_of_many_publishers_wins(bucket: str) -> None:
    def attempt(number: int) -> str:
        store = opened(bucket)
        records = store.write_shard(5, 0, [full_piece("model.w", torch.full((4,), float(number)))])
        ready.append(number)
        while len(ready) < 6:
            time.sleep(0.001)
        try:
            store.publish(5, records, META)
        except InputError as error:
            return str(error)
        return f"won {number}"

    ready: list[int] = []
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attempt, range(6)))
    (winner,) = [result for result in results if result.startswith("won")]
    assert sum("committed already" in result for result in results) == 5
    assert restored(opened(bucket))[1].tolist() == [float(winner.split()[1])] * 4


def test_a_large_shard_goes_up_in_parts(bucket: str, proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "PART_BYTES", 5 << 20)
    tensor = torch.randn(3_000_000)
    store = opened(bucket, timeout=10.0)
    cuts = iter(["", "refuse"])
    proxy.spoil = lambda line: next(cuts, "") if "partNumber" in line else ""
    store.publish(1, store.write_shard(1, 0, [full_piece("model.w", tensor)]), META)
    assert len(proxy.spoiled) == 1
    assert torch.equal(restored(store)[1], tensor)
    # the upload that broke off has left nothing that looks like a file
    assert len(store.backend.list("step-00000001")) == 2


def test_a_store_that_is_down_costs_saves_and_is_told(bucket: str, proxy: Any) -> None:
    store = opened(bucket, retry=Retry(attempts=3, first=0.01), timeout=0.5)
    saver = Saver(store, retention=Retention(keep=2))
    pieces = [full_piece("model.w", torch.ones(1000))]
    saver.save(1, pieces, META)
    outcomes = wait(saver, 1)
    proxy.spoil = lambda line: "refuse"
    began = time.monotonic()
    saver.save(2, pieces, META)
    saver.save(3, pieces, META)
    assert time.monotonic() - began < 10
    outcomes += wait(saver, 2)
    proxy.spoil = lambda line: ""
    saver.save(4, pieces, META)
    outcomes += saver.close()
    assert [(outcome.step, outcome.state) for outcome in outcomes] == [
        (1, "published"),
        (2, "failed"),
        (3, "failed"),
        (4, "published"),
    ]
    assert "\n" not in outcomes[1].reason
    assert outcomes[1].reason
    assert store.steps() == [1, 4]


def wait(saver: Saver, count: int) -> list[Any]:
    outcomes: list[Any] = []
    end = time.monotonic() + 60
    while len(outcomes) < count and time.monotonic() < end:
        outcomes += saver.poll()
        time.sleep(0.01)
    return outcomes


def test_wrong_credentials_are_said_at_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    began = time.monotonic()
    with pytest.raises(PermissionError):
        opened(bucket).steps()
    assert time.monotonic() - began < 30
