"""What a job may not change of the run that it goes on from, and what is taken over of its commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import retention
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.copying import copy_commit
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.models import continued
from orchestrator.models.continued import check_length, check_same_data, continuation_of
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.config import ContinueFrom, Reading, TrainSpec

STEP = 10


def job(name: str = "first", **keys: Any) -> JobSpec:
    return parse(document(name, **keys))


def document(name: str = "first", **keys: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "workload": {"model": "gpt-tiny"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": "t", "sequence_length": 16},
        "train": {"steps": STEP, "global_batch": 8, "optimizer": {"schedule": "constant"}},
    }
    for path, value in keys.items():
        *parts, last = path.split("__")
        at = found
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = value
    return found


def second(run: str, **keys: Any) -> JobSpec:
    return job("second", **{"train__steps": 20, "train__continue_from": run, **keys})


@pytest.fixture
def first(tmp_path: Path) -> str:
    """The directory of a run with one commit."""
    store = Store(str(tmp_path / "first" / "checkpoints"))
    meta = {"position": 80, "receipt": "abc", "identity": job().identity(), "shards": "digest", "attempt": 3}
    meta |= {"rows": [{"step": STEP}], "skips": [{"step": 2, "start": 8, "count": 8}], "loss": 1.0}
    store.publish(STEP, store.write_shard(STEP, 0, [full_piece("model.w", torch.ones(4))]), meta)
    return str(tmp_path / "first")


REFUSED = [
    (
        {"workload__model": "bert-tiny"},
        r"workload\.model is 'gpt-tiny' in .*first@10 and 'bert-tiny'.*init_from",
    ),
    ({"workload__changes": {"layers": 3}}, r"changes\.layers is not set in .* and 3 in the job file"),
    (
        {"train__optimizer": {"name": "lion"}},
        r"optimizer\.name is 'adamw' .*the checkpoint has the state of adamw",
    ),
    ({"train__freeze": ["tokens.*"]}, r"train\.freeze"),
    ({"seed": 4}, r"seed is 0 in .*continue_from\.position restart"),
    ({"data__sources": [{"uri": "b.txt"}]}, r"data\.sources is .*position restart"),
    ({"checkpoint": {"average": {"ema": 0.9}}}, r"a moving average cannot begin or end between phases"),
    ({"train__steps": STEP}, r"train\.steps: 10 steps are not more than .*first@10 has done"),
    ({"train__continue_from": "FIRST@7"}, r"first has no commit at 7.*name a step of \[10\]"),
    ({"train__continue_from": "nowhere"}, r"nowhere has no checkpoint to continue from"),
    (
        {
            "train__continue_from": {"run": "FIRST", "schedule": "restart"},
            "train__optimizer": {"schedule": "wsd", "warmup": 6, "decay": 6},
        },
        r"warm-up and decay are 12 steps, but this phase has 10",
    ),
    (
        {
            "train__continue_from": {"run": "FIRST", "position": "restart"},
            "data__sources": [{"uri": "b.txt"}],
            "data__tokenizer": {"train_bpe": 300},
        },
        r"has other tokens than that of .*first.*set it to .*first/excerpt",
    ),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_what_does_not_fit_is_one_line(
    first: str, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    keys = {"train__continue_from": "FIRST"} | changes
    asked = keys["train__continue_from"]
    keys["train__continue_from"] = (
        asked.replace("FIRST", first) if isinstance(asked, str) else asked | {"run": first}
    )
    with pytest.raises(InputError, match=line) as caught:
        continuation_of(job("second", **{"train__steps": 20, **keys})).source(
            RunDir(str(tmp_path / "second"))
        )
    assert "\n" not in str(caught.value)


def test_another_seed_draws_no_other_weights_that_are_not_trained() -> None:
    """Where data is read from its beginning a phase may have a seed of its own, but its commits lack frozen weights."""
    keys = {"train__steps": 20, "train__continue_from": {"run": "first", "position": "restart"}, "seed": 4}
    frozen, begun = {"train__freeze": ["tokens.*"]}, {"workload__init_from": "other"}
    continuation_of(job("second", **keys)).check_keys(job().identity(), "first@10")
    continuation_of(job("second", **keys, **frozen, **begun)).check_keys(
        job(**frozen, **begun).identity(), "first@10"
    )
    for more in (
        {},
        {**begun, "data__add_tokens": ["<a>"]},
        {**begun, "workload__changes": {"vocab_size": 600}},
    ):
        with pytest.raises(
            InputError, match=r"seed is 0 in first@10 .*draws the weights that are not trained: set it back"
        ):
            continuation_of(job("second", **keys, **frozen, **more)).check_keys(
                job(**frozen, **more).identity(), "first@10"
            )


def test_a_run_that_would_begin_within_a_rollout_is_refused() -> None:
    train = TrainSpec(steps=24, global_batch=8, continue_from=ContinueFrom(run="runs/first"))
    reading = Reading(2, batches=2, epochs=3)
    check_length(train, reading, 12, "runs/first@12")
    with pytest.raises(
        InputError, match="step 10 of runs/first@10 is within a rollout of this job, which has 6"
    ):
        check_length(train, reading, 10, "runs/first@10")


def test_a_run_does_not_go_on_from_itself(first: str) -> None:
    with pytest.raises(InputError, match="cannot continue itself"):
        continuation_of(second(first)).source(RunDir(first))


def test_what_a_phase_may_change(first: str, tmp_path: Path) -> None:
    free = {
        "train__global_batch": 4,
        "train__optimizer": {"lr": 1.0, "schedule": "linear", "weight_decay": 0.5},
        "workload__dropout": 0.1,
    }
    assert continuation_of(second(first, **free)).source(RunDir(str(tmp_path / "second"))) is not None
    other = {"run": first, "position": "restart"}
    new = {"data__sources": [{"uri": "b.txt"}], "seed": 4, "data__sequence_length": 32}
    assert continuation_of(second(first, train__continue_from=other, **new)).source(
        RunDir(str(tmp_path / "second"))
    )


@pytest.mark.parametrize(("position", "begins"), [("keep", 80), ("restart", 0)])
def test_the_commit_becomes_the_first_of_the_run(
    first: str, tmp_path: Path, position: str, begins: int
) -> None:
    spec = second(first, train__continue_from={"run": first, "position": position})
    run = RunDir(str(tmp_path / "second"))
    run.create()
    source = continuation_of(spec).source(run)
    assert source is not None
    taken = continuation_of(spec).take_over(run, "other", PreparedData("data", {"held": "out"}), None)
    assert taken is not None
    assert (taken.step, taken.position, taken.receipt) == (STEP, begins, "abc")
    told = {"run": first, "step": STEP, "position": 80, "receipt": "abc"}
    assert (taken.meta["continued_from"], run.read_json("origin.json")) == (told, told)
    assert taken.meta["identity"] == spec.identity()
    assert [taken.meta[key] for key in ("attempt", "rows", "loss", "data", "shards")] == [
        0,
        [],
        None,
        "data",
        "other",
    ]
    assert bool(taken.meta["skips"]) == (position == "keep")
    # A newer commit of the other run is not taken once this one has begun.
    theirs = Store(f"{first}/checkpoints")
    theirs.publish(12, theirs.write_shard(12, 0, [full_piece("model.w", torch.ones(4))]), dict(source.commit.meta) | {
        "position": 96, "receipt": "def",
    })  # fmt: skip
    again = continuation_of(spec).source(run)
    assert again is not None
    assert again.commit.step == STEP
    run.write_text("origin.json", "{")
    with pytest.raises(InputError, match=r"is damaged; put it back; or remove it: the run has no commit yet"):
        continuation_of(spec).source(run)


def test_other_tokens_are_refused_where_the_position_is_kept(first: str, tmp_path: Path) -> None:
    spec = second(first)
    source = continuation_of(spec).source(RunDir(str(tmp_path / "second")))
    assert source is not None
    check_same_data(spec.train, source, "digest", "data")
    with pytest.raises(InputError, match=r"the tokens in data differ from those that .*first@10 has read"):
        check_same_data(spec.train, source, "other", "data")


def test_a_damaged_commit_is_not_taken_over(first: str, tmp_path: Path) -> None:
    (shard,) = Path(first, "checkpoints", f"step-{STEP:08d}").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    spec, run = second(first), RunDir(str(tmp_path / "second"))
    source = continuation_of(spec).source(run)
    assert source is not None
    with pytest.raises(InputError, match="first@10 is damaged"):
        continuation_of(spec).take_over(run, "digest", PreparedData(), None)
    assert Store(run.at("checkpoints")).steps() == []


def commit(store: Store, step: int) -> list[int]:
    """Commit a step of the first run, which keeps the newest alone; the steps that are removed."""
    meta = dict(store.manifest(STEP).meta) | {"position": 8 * step, "receipt": "def"}
    store.publish(step, store.write_shard(step, 0, [full_piece("model.w", torch.ones(4))]), meta)
    return prune(store, Retention(keep=1))


def test_what_is_taken_over_is_held_meanwhile(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, theirs = RunDir(str(tmp_path / "second")), Store(f"{first}/checkpoints")
    run.create()

    def late(*words: Any, **keywords: Any) -> None:
        assert commit(theirs, 12) == []
        copy_commit(*words, **keywords)

    monkeypatch.setattr(continued, "copy_commit", late)
    taken = continuation_of(second(first)).take_over(run, "digest", PreparedData(), None)
    assert taken is not None
    assert taken.step == STEP
    assert prune(theirs, Retention(keep=1)) == [STEP]


@pytest.mark.parametrize("tag", ["", f"@{STEP}"])
def test_a_commit_that_is_removed_before_it_is_held(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    """Is followed by the next, unless it is named; and nothing says that the run has begun with it."""
    run, theirs = RunDir(str(tmp_path / "second")), Store(f"{first}/checkpoints")
    run.create()

    def late(*words: Any, **keywords: Any) -> None:
        if STEP in theirs.steps():
            monkeypatch.setattr(retention, "pinned_steps", lambda paths: set())
            commit(theirs, 12)
        copy_commit(*words, **keywords)

    monkeypatch.setattr(continued, "copy_commit", late)
    spec = second(f"{first}{tag}")
    if tag:
        with pytest.raises(
            InputError, match=r"train.continue_from: .*first has no commit at 10; name a step of"
        ):
            continuation_of(spec).take_over(run, "digest", PreparedData(), None)
        assert not run.exists("origin.json")
        return
    taken = continuation_of(spec).take_over(run, "digest", PreparedData(), None)
    assert taken is not None
    assert (taken.step, (run.read_json("origin.json") or {})["step"]) == (12, 12)
