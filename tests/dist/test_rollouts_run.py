"""Whole runs that learn from rewards: the answers, rewards and weights of a quiet run, whatever the layout and whatever
fails."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from jobs import curve, job, rows, weights
from letters import letters, write_tokenizer
from local_run import (
    LocalGang,
    RolloutGang,
    controller_here,
    drive_here,
    export_here,
    with_rollout_workers,
)
from tokenizers import pre_tokenizers
from trl_models import KNOWN, a_tokenizer, model_of

from cluster.workers import device_limits
from cluster.workers.gang import Gang
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller import decide, rollout_workers
from orchestrator.data.samples.skips import Skip
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.models.averaged import weights_of
from orchestrator.resolve.commit_model import CommitModel, model_of_run
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.rollouts.ahead import Ahead
from orchestrator.train.rollouts.reward_check import check_reward_models
from orchestrator.train.rollouts.stored_rollouts import kept_steps, read_kept
from orchestrator.verify.replay import replay
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.answers import Drawn, draw_answers
from workloads.model.heads import ANSWER_ENDS
from workloads.workload import Sampling

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
STEPS, COUNT, GROUP = 8, 200, 4
REWARDS = '''
def early(prompt: str, answer: str) -> float:
    """The share of the answer's letters in the first half of the alphabet."""
    assert prompt
    return sum(letter < "i" for letter in answer.split()) / 8


def even(answer: str) -> float:
    return sum(int(word[1:]) % 2 == 0 for word in answer.split()) / 8


def slow(columns: dict) -> float:
    import time
    time.sleep(9.0 if SLOW.pop() else 0.0)
    return 0.0


SLOW = [0] * 10**6
SLOW[-40] = 1


def offline(k_th: str) -> float:
    raise ConnectionError("the reward's service is gone")


def in_turns(answer: str, k_th: str) -> float:
    if len(answer) % 3 == 0:
        raise ValueError(f"no reward for {k_th}")
    return 1.0
'''


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own code is found in the working directory."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    monkeypatch.setattr(decide, "SETTLE", 0.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, a tokenizer and own rewards."""
    folder = tmp_path_factory.mktemp("rollouts")
    asked = [{"question": letters(n), "k_th": f"row {n}"} for n in range(COUNT)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "judges.py").write_text(REWARDS)
    write_tokenizer(folder, template=False)
    return folder


def document(place: Path, **train: Any) -> dict[str, Any]:
    found = job(
        str(place / "prompts.jsonl"),
        steps=STEPS,
        global_batch=16,
        optimizer={"lr": 2e-2, "schedule": "constant"},
        **train,
    )
    found["workload"] = {"model": "qwen3-tiny", "changes": {**SMALL, "kv_heads": 2}, "objective": "grpo"}
    found["data"] = {
        "sources": [{"uri": str(place / "prompts.jsonl"), "field": {"prompt": "question", "k_th": "k_th"}}],
        "tokenizer": str(place), "sequence_length": 32, "validation": {"share": 0.1},
    }  # fmt: skip
    found["rollout"] = {"group": GROUP, "max_tokens": 8, "together": 2, "keep_every": 4}
    found["rewards"] = [{"own": "judges:early"}]
    found["evaluate"] = {"every": 4, "at_start": True, "answers": 3}
    found["checkpoint"] = {"every": 3, "keep": 3, "export": None}
    found["parallel"] = {"micro_batch": 2}
    return found


def run_of(place: Path, name: str, found: dict[str, Any], **how: Any) -> Path:
    run = place / name
    drive_here(found, str(run), place / "cache", **how)
    return run


@pytest.fixture(scope="module")
def quiet(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", [*sys.path, str(place)])
        return run_of(place, "quiet", document(place))


def answers(run: Path, step: int) -> list[tuple[int, int, str, float]]:
    return [
        (line["prompt_number"], line["k"], line["answer"], line["reward"])
        for line in read_kept(str(run), step)[1]
    ]


def test_the_reward_rises_and_the_rows_say_what_happened(quiet: Path) -> None:
    found = rows(quiet)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert found[-1]["reward"] > found[0]["reward"] + 0.1
    for row in found:
        assert 1 <= row["answer_tokens"] <= 8
        assert 0 <= row["without_signal"] <= 1
        assert row["sampler_difference"] < 1e-5
        assert row["generate_seconds"] > 0
        generated = 16 * row["answer_tokens"] / row["generate_seconds"]
        assert row["generated_tokens_per_second"] == pytest.approx(generated, rel=1e-3)
        assert row["reward_seconds"] > 0
    held = [row["sets"]["validation"] for row in rows(quiet, "evals.jsonl")]
    assert len(held) == 3
    assert held[-1]["reward"] > held[0]["reward"]
    for found_then in held:
        assert 0 <= found_then["pass_at_1"] <= found_then["pass_at_2"] <= found_then["pass_at_3"] <= 1
    assert held[-1]["pass_at_3"] > held[0]["pass_at_3"]
    assert kept_steps(str(quiet)) == [1, 4, 8]
    lines = read_kept(str(quiet), 1)[1]
    assert len(lines) == 16
    assert {line["k"] for line in lines} == set(range(GROUP))
    assert len({line["prompt_number"] for line in lines}) == 4
    assert found[0]["reward"] == pytest.approx(sum(line["reward"] for line in lines) / 16)
    assert all(line["columns"]["k_th"].startswith("row ") for line in lines)
    page = (quiet / "report.html").read_text()
    best = max(lines[:GROUP], key=lambda line: float(line["reward"]))
    assert "What the model answers" in page
    assert f"{best['reward']:.3f}" in page
    assert f"<td>{best['answer'] or '(nothing)'}</td>" in page


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2},
        pytest.param({"zero": 3}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_generates_the_same_answers(
    parallel: dict[str, Any], quiet: Path, place: Path, tmp_path: Path
) -> None:
    """Until rounding has made a difference: the first step's answers come from equal weights."""
    found = document(place)
    found["parallel"] |= parallel
    found["resources"]["workers"]["min"] = 2
    run = run_of(tmp_path, "run", found)
    assert answers(run, 1) == answers(quiet, 1)
    # Generation undivided and training divided add in different orders, and the row says by how much that differs.
    assert all(0.0 < row["sampler_difference"] < 1e-5 for row in rows(run))
    for one, other in zip(rows(run)[:3], rows(quiet)[:3], strict=True):
        assert one["reward"] == pytest.approx(other["reward"], abs=0.05)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)


def test_kills_change_no_answer_and_no_bit(quiet: Path, place: Path, tmp_path: Path) -> None:
    """Requests: NeMo-RL#3599, trl#5911, OpenRLHF#1322, trl#7294, torchtitan#3751."""
    run = run_of(tmp_path, "run", document(place), faults=("kill@0:2", "kill@1:5/2", "kill@1:4e/3"))
    assert curve(run) == curve(quiet)
    assert weights(run, STEPS) == weights(quiet, STEPS)
    for step in (1, 4, 8):
        assert answers(run, step) == answers(quiet, step)


@pytest.mark.slow
@pytest.mark.parametrize("has_workers", [False, True])
def test_weights_that_generate_no_answers_are_a_fault_of_the_step(
    quiet: Path, place: Path, tmp_path: Path, has_workers: bool
) -> None:
    """The stability policy decides, as after a loss that is NaN, and no rollout worker is blamed."""
    found, how = document(place), {}
    if has_workers:
        found = with_workers(place, most=1)
        how = {"gang": with_rollout_workers([3])}
    run = run_of(tmp_path, "run", found, faults=("nan@0:5",), **how)
    events = rows(run, "events.jsonl")
    (fault,) = [event["first_fault"] for event in events if event["first_fault"]]
    assert "logits of generated answers are not finite" in str(fault)
    # Step 5 reads four prompts from position 16 on.
    assert [event["reason"] for event in events if "left out" in event["reason"]] == [
        "a fault ended the attempt; 4 samples from position 16 are left out"
    ]
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert curve(run)[:4] == curve(quiet)[:4]


@pytest.mark.slow
def test_a_frozen_rank_is_replaced_and_changes_no_bit(quiet: Path, place: Path, tmp_path: Path) -> None:
    """Rank 1 freezes as step 5 begins, so that rank 0 waits for it as it takes the weights to generate with.

    Requests: verl#7155, trl#6797.
    """
    run = run_of(tmp_path, "run", document(place), faults=("stop@1:5",))
    assert {row["attempt"] for row in rows(run)} == {1, 2}
    waits = (run / "logs/attempt-1/rank-0.log").read_text()
    assert "rollouts/replica.py" in waits, waits
    assert curve(run) == curve(quiet)
    assert weights(run, STEPS) == weights(quiet, STEPS)
    assert answers(run, 8) == answers(quiet, 8)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_width_has_the_same_bits_where_bits_are_asked_for(
    precision: str, place: Path, tmp_path: Path
) -> None:
    """Asked for in verl#7216. Units of three prompts do not end where micro-batches do."""
    runs = []
    gangs = {"width1": lambda: LocalGang([1]), "width2": lambda: LocalGang([2]), "workers": None}
    for name, gang in gangs.items():
        found = document(place, determinism="bitwise", virtual_shards=4, precision=precision)
        found["parallel"]["micro_batch"] = 4
        found["rollout"]["together"] = 3
        if gang is None:
            found["rollout"]["workers"] = {"min": 1, "max": 1}
            gang = with_rollout_workers([3])
        runs.append(run_of(tmp_path, name, found, gang=gang))
    for run in runs:
        assert curve(run) == curve(runs[0])
        assert weights(run, STEPS) == weights(runs[0], STEPS)
        assert answers(run, 8) == answers(runs[0], 8)
        assert [row["sampler_difference"] for row in rows(run)] == [0.0] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_such_a_fault_leaves_out_the_same_samples_of_stale_rollouts(
    workers: int, place: Path, tmp_path: Path
) -> None:
    """The answers of step 5 are there already; those of step 6 are what the weights cannot generate."""
    found = stale(place)
    found["rollout"] |= {"workers": workers or None, "keep_every": 1}
    gang = with_rollout_workers([2 + workers]) if workers else None
    run = run_of(tmp_path, "run", found, gang=gang, faults=("nan@0:5",))
    (stop,) = [event for event in rows(run, "events.jsonl") if event.get("first_fault")]
    assert "logits of generated answers are not finite at step 5, samples from position 16" in str(
        stop["first_fault"]
    )
    assert stop["skipped"] == {"step": 5, "start": 16, "count": 4, "lr_scale": 1.0}
    assert {line["prompt_number"] for line in read_kept(str(run), 5)[1]} == set(range(20, 24))
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_without_retries_such_a_fault_ends_the_run_and_names_the_step(place: Path, tmp_path: Path) -> None:
    found = document(place, stability={"retries": 0})
    summary = drive_here(found, str(tmp_path / "run"), place / "cache", faults=("nan@0:5",))
    assert summary["state"] == "failed"
    assert "not finite at step 5, samples from position 16" in summary["reason"]
    assert "train.stability.retries 0 are spent" in summary["reason"]


def with_workers(place: Path, least: int = 1, most: int = 2, **train: Any) -> dict[str, Any]:
    found = document(place, **train)
    found["rollout"]["workers"] = {"min": least, "max": most}
    return found


def same(run: Path, quiet: Path) -> None:
    """The same answers, rewards, losses, receipt and weights, to the bit."""
    assert curve(run) == curve(quiet)
    assert weights(run, STEPS) == weights(quiet, STEPS)
    for step in (1, 4, 8):
        assert answers(run, step) == answers(quiet, step)
    held = [[row["sets"] for row in rows(each, "evals.jsonl")] for each in (run, quiet)]
    assert held[0] == held[1]


@pytest.mark.slow
def test_the_difference_between_vllm_and_training_is_on_record(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cannot run here: `tests/fixtures/vllm_stub.py` stands in its place, where the workers find own code. Its
    log-probabilities are those of transformers, and 0.25 more."""
    (tmp_path / "vllm").mkdir()
    shutil.copy(Path(__file__).parents[1] / "fixtures" / "vllm_stub.py", tmp_path / "vllm" / "__init__.py")
    (tmp_path / "judges_of_vllm.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_STUB_SHIFT", "0.25")
    found = with_workers(place, most=1)
    found["rollout"]["engine"] = "vllm"
    found["rewards"] = [{"own": "judges_of_vllm:early"}]
    run = run_of(tmp_path, "run", found, gang=with_rollout_workers([3]))
    made = rows(run)
    assert [row["step"] for row in made] == list(range(1, STEPS + 1))
    assert all(row["sampler_difference"] == pytest.approx(0.25, abs=1e-5) for row in made)
    assert not any("entropy" in row for row in made)
    assert made[-1]["reward"] > made[0]["reward"]
    with pytest.raises(InputError, match="answers of vllm depend on its batches"):
        replay(parse(found), RunDir(str(run)), None, 1)


def test_rollout_workers_that_come_and_die_change_no_bit(quiet: Path, place: Path, tmp_path: Path) -> None:
    """The first worker dies within its second unit, and a rank at step 5.

    Asked for in verl#7155, AReaL#606 and miles#1724.
    """
    gang = with_rollout_workers([3], faults=("kill@0:2",))
    run = run_of(tmp_path, "run", with_workers(place, most=1), gang=gang, faults=("kill@1:5",))
    same(run, quiet)
    told = [event["reason"] for event in rows(run, "events.jsonl") if "rollout worker 1" in event["reason"]]
    assert len(told) == 1, told
    assert told[0].endswith("others generate its answers")
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < summary["rollout_worker_hours"] < summary["worker_hours"]


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2])
def test_any_number_of_rollout_workers_gives_the_same_bits(
    most: int, quiet: Path, place: Path, tmp_path: Path
) -> None:
    gang = with_rollout_workers([2 + most])
    same(run_of(tmp_path, "run", with_workers(place, most=most), gang=gang), quiet)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_one_to_four_rollout_workers_and_back_give_the_same_bits(
    staleness: int, place: Path, tmp_path: Path
) -> None:
    """A step has four units, so that four workers have work. Workers die in every part of the run."""
    widths = ((2, 1), (4, 4), (6, 2), (None, 0))
    runs = []
    for name in ("quiet", "widths"):
        found = document(place)
        found["rollout"] |= {"together": 1, "staleness": staleness}
        if name == "quiet":
            runs.append(run_of(tmp_path, name, found))
            continue
        for until, most in widths:
            found["rollout"]["workers"] = {"min": most, "max": most} if most else None
            gang = with_rollout_workers([2 + most], faults=("kill@0:2",)) if most else None
            controller_here(found, str(tmp_path / name), place / "cache", gang=gang, until=until).drive()
        runs.append(tmp_path / name)
    same(runs[1], runs[0])
    told = [event.get("rollout_workers", ()) for event in rows(runs[1], "events.jsonl")]
    assert max(change["workers"] for changes in told for change in changes) == 4


@pytest.mark.slow
def test_a_frozen_rollout_worker_is_replaced_and_changes_no_bit(
    quiet: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open, so that only the controller can give its unit to another one."""
    monkeypatch.setattr(rollout_workers, "LONGEST_STEP", 0.0)
    gang = with_rollout_workers([3], faults=("stop@0:4",))
    run = run_of(tmp_path, "run", with_workers(place, most=1), gang=gang)
    same(run, quiet)
    assert any("no sign of life" in event["reason"] for event in rows(run, "events.jsonl"))


@pytest.mark.slow
def test_a_rollout_worker_that_always_fails_ends_the_run(place: Path, tmp_path: Path) -> None:
    def gang() -> Gang:
        made.append(RolloutGang(("raise@0:1/*",)) if made else LocalGang([3]))
        return made[-1]

    made: list[Gang] = []
    found = with_workers(place, most=1)
    found["limits"] = {"restarts": 1}
    summary = drive_here(found, str(tmp_path / "run"), place / "cache", gang=gang)
    assert summary["state"] == "failed"
    why = rows(tmp_path / "run", "events.jsonl")[-1]["reason"]
    assert "rollout worker" in why, why
    assert "InjectedFault" in why


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_faults_at_random_of_ranks_and_rollout_workers_change_no_bit(
    seed: int, quiet: Path, place: Path, tmp_path: Path
) -> None:
    """Four faults of ranks, and as many of rollout workers, while there is room for one of these or for two."""
    draw = random.Random(seed)
    places = sorted({(draw.randrange(1, STEPS), draw.random() < 0.2) for _ in range(4)})
    of_ranks = tuple(
        f"kill@{draw.randrange(2)}:{4 if is_late else step}{'e' if is_late else ''}/{attempt}"
        for attempt, (step, is_late) in enumerate(places, start=1)
    )
    of_workers = tuple(f"{draw.choice(('kill', 'raise'))}@0:{draw.randrange(1, 7)}" for _ in range(4))
    rooms = [draw.choice((3, 4)) for _ in range(8)]
    gang = with_rollout_workers(rooms, faults=of_workers)
    run = run_of(tmp_path, "run", with_workers(place), gang=gang, faults=of_ranks)
    same(run, quiet)
    events = rows(run, "events.jsonl")
    assert sum("others generate" in event["reason"] for event in events) > 0
    assert sum(bool(event.get("first_fault")) for event in events) > 0


FRAGILE = '''
import os
import signal
import subprocess

from judges import early as sound

CALLS, STRIKES = {calls!r}, {strikes!r}


def early(prompt: str, answer: str) -> float:
    """The reward of the quiet run, from a process to which something happens at some of its calls."""
    with open(CALLS, "ab", buffering=0) as file:  # all processes append, so that each call has a number of its own
        file.write(b".")
        call = file.tell()
    kind = STRIKES.get(call)
    if kind is not None:
        with open(CALLS + "-struck", "a") as file:
            file.write(kind + "\\n")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "kill the worker":
        os.kill(os.getppid(), signal.SIGKILL)
    elif kind == "freeze the worker":
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {{os.getppid()}}"])
        os.kill(os.getppid(), signal.SIGSTOP)
    return sound(prompt, answer)
'''
"""Own code whose process, or the worker that holds it, is killed or frozen at given calls."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_faults_at_random_of_reward_processes_too_change_no_bit(
    seed: int, quiet: Path, place: Path, tmp_path: Path
) -> None:
    """Ten faults of reward processes, besides two of ranks and of rollout workers.

    A process that is killed scores its answer again in another one. One that is frozen goes on after two seconds.
    """
    draw = random.Random(200 + seed)
    kinds = ("kill", "kill the worker", "freeze the worker")
    # Of some 370 calls; those of steps that are done again come on top.
    strikes = {call: draw.choice(kinds) for call in draw.sample(range(1, 340), 10)}
    calls = tmp_path / "calls"
    (place / f"fragile{seed}.py").write_text(FRAGILE.format(calls=str(calls), strikes=strikes))
    steps = sorted(draw.sample(range(1, STEPS), 2))
    of_ranks = tuple(
        f"kill@{draw.randrange(2)}:{step}/{attempt}" for attempt, step in enumerate(steps, start=1)
    )
    of_workers = tuple(f"{draw.choice(('kill', 'raise'))}@0:{draw.randrange(1, 7)}" for _ in range(2))
    found = with_workers(place)
    found["rewards"] = [{"own": f"fragile{seed}:early"}]
    gang = with_rollout_workers([draw.choice((3, 4)) for _ in range(6)], faults=of_workers)
    run = run_of(tmp_path, "run", found, gang=gang, faults=of_ranks)
    same(run, quiet)
    events = rows(run, "events.jsonl")
    assert sum(bool(event.get("first_fault")) for event in events) == 2
    assert sum("others generate" in event["reason"] for event in events) > 0
    struck = Path(f"{calls}-struck").read_text().splitlines()
    assert sorted(struck) == sorted(strikes.values())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"zero": 3}, {"pp": 2}], ids=str)
def test_rollout_workers_get_the_weights_of_every_layout(
    parallel: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    """The answers of the ranks of the same layout, to the bit."""
    runs = []
    for name in ("ranks", "workers"):
        found = with_workers(place) if name == "workers" else document(place)
        found["parallel"] |= parallel
        found["resources"]["workers"]["min"] = 2
        gang = with_rollout_workers([4]) if name == "workers" else None
        runs.append(run_of(tmp_path, name, found, gang=gang))
    same(runs[1], runs[0])


def stale(place: Path, **train: Any) -> dict[str, Any]:
    found = document(place, **train)
    found["rollout"]["staleness"] = 1
    return found


@pytest.fixture(scope="module")
def quiet_stale(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", [*sys.path, str(place)])
        found = stale(place)
        found["rollout"]["keep_every"] = 1
        found["checkpoint"] |= {"every": 1, "keep": STEPS}
        return run_of(place, "quiet-stale", found)


def test_stale_answers_come_from_the_weights_before_the_rollout_before(
    quiet_stale: Path, quiet: Path
) -> None:
    """Those of the first two steps come from the initial weights."""
    found = rows(quiet_stale)
    assert [row["rollout_version"] for row in found] == [0, 0, *range(1, STEPS - 1)]
    assert answers(quiet_stale, 1) == answers(quiet, 1)
    assert found[0]["loss"] == rows(quiet)[0]["loss"]
    assert [line["version"] for line in read_kept(str(quiet_stale), 4)[1]] == [2] * 16
    assert [line["version"] for line in read_kept(str(quiet), 4)[1]] == [3] * 16
    # Only there the weights of training are those of generation.
    assert ["sampler_difference" in row for row in found] == [True] + [False] * (STEPS - 1)
    assert all(row["generated_tokens_per_second"] > 0 for row in found)
    assert found[-1]["reward"] > found[0]["reward"] + 0.1


def test_the_loss_of_stale_answers_is_the_plain_one_with_the_earlier_weights_probabilities(
    quiet_stale: Path, place: Path
) -> None:
    """Step 3 trains the weights of step 2 on answers of the weights of step 1, which the commit of step 2 has."""
    store = Store(str(quiet_stale / "checkpoints"))
    ahead = Ahead.read(weights_of(store, store.manifest(2), CheckpointSpec(), raw=True))
    assert ahead is not None
    assert ahead.version == 1
    made = [model_of_run(str(quiet_stale), step) for step in (1, 2)]
    before, after = (with_weights(each.workload, each.read) for each in made)
    encode = made[0].tokens.tokenizer().encode
    lines = read_kept(str(quiet_stale), 3)[1]
    drawn = [answer for each in ahead.answers for answer in each]
    losses = []
    clipped = []
    for number, (line, answer) in enumerate(zip(lines, drawn, strict=True)):
        prompt = encode(line["prompt"], add_special_tokens=False).ids
        group = [each["reward"] for each in lines[number // GROUP * GROUP :][:GROUP]]
        advantage = (line["reward"] - mean(group)) / (stdev(group) + 1e-4)

        def log_p(model: Any, prompt: list[int] = prompt, answer: Any = answer) -> torch.Tensor:
            said = torch.tensor(answer.tokens)
            logits = model({"tokens": torch.tensor([prompt + answer.tokens])}).logits[0]
            return logits[len(prompt) - 1 : -1].float().log_softmax(-1).gather(1, said[:, None])[:, 0]

        then = log_p(before)
        assert then.tolist() == pytest.approx(answer.log_probabilities, abs=1e-5)
        ratio = (log_p(after) - then).exp()
        each = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        losses.append(each.mean().item())
        clipped += (-each < ratio * advantage).tolist()
    row = rows(quiet_stale)[2]
    assert row["loss"] == pytest.approx(mean(losses), abs=1e-5)
    assert abs(row["loss"]) > 1e-4, "with its own probabilities it would be zero"
    assert row["clip_share"] == pytest.approx(mean(clipped), abs=1e-6)


@pytest.mark.slow
def test_stale_rollouts_have_the_same_bits_with_workers_that_die(
    quiet_stale: Path, place: Path, tmp_path: Path
) -> None:
    """The first worker dies within its third unit, which is of the second rollout, and a rank at step 5."""
    found = stale(place)
    found["rollout"]["workers"] = {"min": 1, "max": 1}
    gang = with_rollout_workers([3], faults=("kill@0:3",))
    run = run_of(tmp_path, "run", found, gang=gang, faults=("kill@0:5",))
    same(run, quiet_stale)
    assert {row["attempt"] for row in rows(run)} == {1, 2}
    assert any(row["overlapped_seconds"] > 0 for row in rows(run) if row["step"] < STEPS)


@pytest.mark.slow
def test_stale_answers_are_taken_along_to_another_layout(
    quiet_stale: Path, place: Path, tmp_path: Path
) -> None:
    """The weights that generated them are not there any more."""
    found = stale(place)
    found["rollout"]["keep_every"] = 1
    found["checkpoint"]["every"] = 4
    controller_here(found, str(tmp_path / "run"), place / "cache", until=4).drive()
    found["parallel"] |= {"tp": 2}
    controller_here(found, str(tmp_path / "run"), place / "cache").drive()
    run = tmp_path / "run"
    assert "tp2" in rows(run)[4]["layout"]
    assert answers(run, 5) == answers(quiet_stale, 5)
    assert rows(run)[4]["samples"] == rows(quiet_stale)[4]["samples"]
    assert rows(run)[4]["loss"] == pytest.approx(rows(quiet_stale)[4]["loss"], abs=1e-6)
    assert rows(run)[-1]["step"] == STEPS


@pytest.mark.slow
def test_a_skip_gives_the_same_bits_from_any_commit_and_a_replay_agrees(place: Path, tmp_path: Path) -> None:
    """The prompts of step 6 are skipped in a run that goes on from the commit directly before, or from an earlier one.

    The commit of step 5 has the answers to these prompts, and the weights before step 5 are gone.
    """
    runs = []
    for until in (5, 3):
        found = stale(place)
        found["rollout"]["keep_every"] = 1
        found["checkpoint"] |= {"every": STEPS, "keep": STEPS}
        run = RunDir(str(tmp_path / f"from-{until}"))
        controller_here(found, run.uri, place / "cache", until=until).drive()
        *_, last = run.rows("events.jsonl")
        run.append("events.jsonl", [last | {"skipped": Skip(6, start=5 * 4, count=4).to_json()}])
        drive_here(found, run.uri, place / "cache")
        runs.append(Path(run.uri))
    same(runs[1], runs[0])
    for each in runs:
        assert [row["rollout_version"] for row in rows(each)] == [0, 0, 1, 2, 3, 5, 5, 6]
        assert ["sampler_difference" in row for row in rows(each)] == [True, *[False] * 4, True, False, False]
    assert {line["prompt_number"] for line in read_kept(str(runs[0]), 6)[1]} == {24, 25, 26, 27}
    result = replay(parse(found), RunDir(str(runs[1])), 3, 5)
    assert len(result.rows) == 5
    assert result.same, result.line


@pytest.mark.slow
def test_a_mixture_that_ends_with_the_run_has_no_answers_generated_ahead_of_its_end(
    place: Path, tmp_path: Path
) -> None:
    """Eight steps read 32 prompts, and 34 come in all: too few for a ninth step, which a longer run would have."""
    lines = (place / "prompts.jsonl").read_text().splitlines(keepends=True)[:34]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    found = stale(place)
    source = {"uri": str(tmp_path / "prompts.jsonl"), "share": 1.0, "max_passes": 1.0}
    found["data"]["sources"] = [found["data"]["sources"][0] | source]
    del found["data"]["validation"], found["evaluate"]
    run = rows(run_of(tmp_path, "run", found))
    assert [row["step"] for row in run] == list(range(1, STEPS + 1))
    assert ["overlapped_seconds" in row for row in run] == [True] * (STEPS - 1) + [False]
    assert run[-1]["transfer_seconds"] == 0.0, "nothing generates with these weights"
    assert all(row["transfer_seconds"] > 0 for row in run[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_faults_at_random_change_no_bit_of_stale_rollouts(
    seed: int, quiet_stale: Path, place: Path, tmp_path: Path
) -> None:
    """Four faults of ranks and four of rollout workers; of three runs each one goes on without any worker, and back."""
    draw = random.Random(100 + seed)
    places = sorted({(draw.randrange(1, STEPS), draw.random() < 0.2) for _ in range(4)})
    of_ranks = tuple(
        f"kill@{draw.randrange(2)}:{4 if is_late else step}{'e' if is_late else ''}/{attempt}"
        for attempt, (step, is_late) in enumerate(places, start=1)
    )
    of_workers = tuple(f"{draw.choice(('kill', 'raise'))}@0:{draw.randrange(1, 7)}" for _ in range(4))
    found = stale(place)
    if seed % 3 == 0:
        run = tmp_path / "run"
        for until, most in ((3, 0), (6, 2), (None, 0)):
            found["rollout"]["workers"] = {"min": 1, "max": most} if most else None
            gang = with_rollout_workers([4], faults=of_workers) if most else None
            controller_here(found, str(run), place / "cache", gang=gang, until=until).drive()
    else:
        found["rollout"]["workers"] = {"min": 1, "max": 2}
        rooms = [draw.choice((3, 4)) for _ in range(8)]
        gang = with_rollout_workers(rooms, faults=of_workers)
        run = run_of(tmp_path, "run", found, gang=gang, faults=of_ranks)
    same(run, quiet_stale)


@pytest.mark.slow
def test_stale_rollouts_have_the_same_bits_at_another_width_where_bits_are_asked_for(
    place: Path, tmp_path: Path
) -> None:
    runs = []
    for name, rooms, faults in (("quiet", [1], ()), ("narrower", [2, 1], ("kill@1:5",))):
        found = stale(place, determinism="bitwise", virtual_shards=4)
        found["parallel"]["micro_batch"] = 4
        runs.append(
            run_of(tmp_path, name, found, gang=lambda rooms=rooms: LocalGang(list(rooms)), faults=faults)
        )
    assert {row["layout"].split()[0] for row in rows(runs[1])} == {"dp2", "dp1"}
    assert curve(runs[0]) == curve(runs[1])
    assert weights(runs[0], STEPS) == weights(runs[1], STEPS)
    assert answers(runs[0], 8) == answers(runs[1], 8)


@pytest.mark.slow
def test_stale_rollouts_of_several_steps_with_evaluations_between_them(place: Path, tmp_path: Path) -> None:
    """The evaluation after step 1 takes other weights while answers of the earlier ones are still generated."""
    runs = []
    for name, workers, faults in (("quiet", None, ()), ("beside", {"min": 1, "max": 1}, ("kill@1:7",))):
        found = stale(place)
        found["rollout"] |= {"steps": 2, "workers": workers}
        found["checkpoint"]["every"] = 4
        found["evaluate"]["every"] = 1
        gang = with_rollout_workers([3]) if workers else None
        runs.append(run_of(tmp_path, name, found, gang=gang, faults=faults))
    same(runs[1], runs[0])
    assert [row["rollout_version"] for row in rows(runs[0])] == [0, 0, 0, 0, 2, 2, 4, 4]
    assert all(("overlapped_seconds" in row) == (row["step"] % 2 == 0) for row in rows(runs[1]))


@pytest.mark.slow
def test_a_stale_run_that_is_extended_is_the_longer_run(place: Path, tmp_path: Path) -> None:
    for steps in (4, 6):
        found = stale(place)
        found["train"]["steps"] = steps
        run_of(tmp_path, "extended", found)
    run_of(tmp_path, "longer", found)
    assert curve(tmp_path / "extended") == curve(tmp_path / "longer")
    assert weights(tmp_path / "extended", 6) == weights(tmp_path / "longer", 6)


def test_the_divergence_from_the_first_weights_is_held_small(
    quiet: Path, place: Path, tmp_path: Path
) -> None:
    found = document(place)
    found["workload"]["options"] = {"beta": 5.0}
    run = rows(run_of(tmp_path, "run", found))
    assert run[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(row["kl"] >= 0 for row in run)
    assert run[-1]["reward"] < rows(quiet)[-1]["reward"]


def test_an_answer_without_a_reward_is_left_out_and_said(place: Path, tmp_path: Path) -> None:
    """It does not count as a reward of zero: asked for in NeMo-RL#3589."""
    found = document(place)
    found["rewards"].append({"own": "judges:in_turns", "on_error": "skip", "weight": 0.5})
    run = rows(run_of(tmp_path, "run", found))
    assert any(0 < row["unscored"] < 1 for row in run)
    assert all("reward_early" in row and "reward_in_turns" in row for row in run)


def test_a_run_all_of_whose_answers_are_left_out_fails_and_names_the_reward(
    place: Path, tmp_path: Path
) -> None:
    """It trained on nothing and ended as done. The two steps before the third in a row have their rows."""
    found = document(place)
    found["rewards"] = [{"own": "judges:offline", "on_error": "skip"}, {"own": "judges:early"}]
    found["rollout"]["together"] = 4  # one unit, so that rank 1 scores no answer
    summary = drive_here(found, str(tmp_path / "run"), place / "cache")
    assert summary["state"] == "failed"
    assert "offline left out all answers of 3 steps in a row" in summary["reason"]
    assert "ConnectionError: the reward's service is gone (judges.py:" in summary["reason"]
    assert "at prompt 11 (step 2, answer 3)" in summary["reason"]
    assert "set on_error to zero" in summary["reason"]
    assert [row["unscored"] for row in rows(tmp_path / "run")] == [1.0, 1.0]


def test_a_reward_that_fails_ends_the_run_with_the_prompts_number(place: Path, tmp_path: Path) -> None:
    found = document(place)
    found["rewards"] = [{"own": "judges:in_turns"}]
    summary = drive_here(found, str(tmp_path / "run"), place / "cache")
    assert summary["state"] == "failed"
    why = " ".join(str(event) for event in rows(tmp_path / "run", "events.jsonl"))
    assert "prompt" in why, why
    assert "no reward for row" in why


@pytest.mark.slow
def test_several_steps_learn_from_one_rollout_and_a_kill_between_them_changes_no_bit(
    place: Path, tmp_path: Path
) -> None:
    runs = []
    for name, faults in (("quiet", ()), ("killed", ("kill@1:4", "kill@0:8/2"))):
        found = document(place)
        found["rollout"] |= {"steps": 2}
        found["checkpoint"]["every"] = 4
        found["workload"]["options"] = {"epsilon": 0.01}
        runs.append(run_of(tmp_path, name, found, faults=faults))
    quiet, killed = runs
    assert curve(quiet) == curve(killed)
    assert weights(quiet, STEPS) == weights(killed, STEPS)
    found = rows(quiet)
    # the first step of a rollout is on the weights that made it, so that nothing can be clipped there
    assert all(row["clip_share"] == 0 for row in found[::2])
    assert any(row["clip_share"] > 0 for row in found[1::2])
    assert all(("generate_seconds" in row) == (row["step"] % 2 == 1) for row in found)
    numbers = [{line["prompt_number"] for line in read_kept(str(quiet), step)[1]} for step in (4, 8)]
    assert numbers == [{12, 13, 14, 15}, {28, 29, 30, 31}]


def repeated(place: Path, **train: Any) -> dict[str, Any]:
    """Rollouts of two batches, each learned from twice: four updates."""
    found = document(place, **train)
    found["train"]["optimizer"] |= {"eps": 1e-4, "weight_decay": 0.0}
    found["rollout"] |= {"steps": 2, "epochs": 2, "keep_every": 1}
    found["checkpoint"]["every"] = 4
    found["workload"]["options"] = {"epsilon": 0.02, "epsilon_high": 0.05}
    return found


@pytest.fixture(scope="module")
def quiet_repeated(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", [*sys.path, str(place)])
        return run_of(place, "quiet-repeated", repeated(place))


def drawn_again(run: Path, model: Any, made: CommitModel, step: int) -> list[Drawn]:
    """The answers that a step learned from, drawn again by the weights that generated them."""
    lines = read_kept(str(run), step)[1]
    prompts = {line["prompt_number"]: made.tokens.tokenizer().encode(line["prompt"]).ids for line in lines}
    found = draw_answers(
        model,
        made.workload.config,
        prompts=list(prompts.values()),
        numbers=[[number * GROUP + k for k in range(GROUP)] for number in prompts],
        max_tokens=8,
        sampling=Sampling(1.0, 0, 1.0, made.spec.seed),
        ends={made.workload.vocabulary.eos},
    )
    drawn = [answer for answers in found for answer in answers]
    assert [made.tokens.tokenizer().decode(answer.tokens) for answer in drawn] == [
        line["answer"] for line in lines
    ]
    return drawn


def test_several_updates_on_the_same_answers_are_those_of_a_plain_loop(quiet_repeated: Path) -> None:
    """Plain torch takes the eight updates on the answers of the run, with the probabilities that they had at first.

    Asked for in unsloth#2292.
    """
    found = rows(quiet_repeated)
    assert [row["rollout_epoch"] for row in found] == [1, 1, 2, 2] * 2
    assert [("generate_seconds" in row) for row in found] == [True, False, False, False] * 2
    made = model_of_run(str(quiet_repeated), 4)
    model = with_weights(made.workload, lambda name: made.workload.initial(name, made.spec.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    encode = made.tokens.tokenizer().encode
    for first in (0, 4):
        generated_by = model if not first else with_weights(made.workload, made.read)
        batches = []
        for step in (first + 1, first + 2):
            lines = read_kept(str(quiet_repeated), step)[1]
            assert {line["version"] for line in lines} == {first}
            # the later epoch has the same answers, in the same order
            again = read_kept(str(quiet_repeated), step + 2)[1]
            assert [line | {"epoch": 2} for line in lines] == again
            rewards = torch.tensor([line["reward"] for line in lines], dtype=torch.float64).view(-1, GROUP)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            drawn = drawn_again(quiet_repeated, generated_by, made, step)
            prompts = [encode(line["prompt"]).ids for line in lines]
            batches.append(list(zip(prompts, drawn, advantages.flatten().tolist(), strict=True)))

        def log_p(prompt: list[int], answer: Drawn) -> torch.Tensor:
            logits = model({"tokens": torch.tensor([prompt + answer.tokens])}).logits[0, len(prompt) - 1 : -1]
            return logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]

        with torch.no_grad():
            before = [[log_p(prompt, answer) for prompt, answer, _ in batch] for batch in batches]
        for update in range(4):
            losses = []
            clipped: list[bool] = []
            for (prompt, answer, advantage), then in zip(
                batches[update % 2], before[update % 2], strict=True
            ):
                ratio = (log_p(prompt, answer) - then).exp()
                bounded = torch.min(ratio * advantage, ratio.clamp(0.98, 1.05) * advantage)
                losses.append(-bounded.mean())
                clipped += (bounded < ratio * advantage).tolist()
            optimizer.zero_grad()
            loss = torch.stack(losses).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            row = found[first + update]
            assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
            assert row["clip_share"] == pytest.approx(mean(clipped), abs=1e-6)
            assert (row["clip_share"] == 0) == (update == 0), "only the first update has a ratio of 1"
    store = Store(str(quiet_repeated / "checkpoints"))
    trained = store.reader(store.manifest(STEPS))
    for name, parameter in model.named_parameters():
        assert torch.allclose(trained.read(f"model.{name}"), parameter, atol=1e-5), name


def test_a_run_that_is_killed_between_updates_of_the_same_answers_has_the_same_bits(
    quiet_repeated: Path, place: Path, tmp_path: Path
) -> None:
    run = run_of(tmp_path, "run", repeated(place), faults=("kill@1:3", "kill@0:8/2"))
    assert {row["attempt"] for row in rows(run)} == {2, 3}
    same(run, quiet_repeated)
    store = Store(str(run / "checkpoints"))
    # two rollouts of two batches of four prompts, each once
    assert [store.manifest(step).position for step in (4, STEPS)] == [8, 16]


@pytest.mark.slow
def test_several_updates_on_the_same_answers_are_those_of_trl(place: Path, tmp_path: Path) -> None:
    """TRL's trainer takes six updates with num_iterations 3 on the answers and rewards of a run with epochs 3."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = tmp_path / "model"
    model = model_of(folder, "LlamaForCausalLM")
    tokenizer = a_tokenizer(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save_pretrained(folder)
    # no word begins with w1 or w2, which a tokenizer of transformers would find in it as special tokens
    asked = [" ".join(f"w{30 + (7 * row + word) % 60}" for word in range(3 + row % 4)) for row in range(40)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in asked))
    found = repeated(place)
    found["workload"] = {
        "model": f"hf:{folder}", "objective": "grpo", "options": {"epsilon": 0.02, "epsilon_high": 0.05},
    }  # fmt: skip
    found["data"] = {
        "sources": [{"uri": str(tmp_path / "asked.jsonl"), "field": {"prompt": "question"}}],
        "tokenizer": str(folder), "sequence_length": 32,
    }  # fmt: skip
    found["train"] |= {"steps": 6}
    found["train"]["optimizer"]["lr"] = 3e-3
    found["rewards"] = [{"own": "judges:even"}]
    found["rollout"] |= {"steps": 1, "epochs": 3}
    found["checkpoint"] |= {"every": 3, "keep": 4}
    del found["evaluate"]
    run = tmp_path / "run"
    drive_here(found, str(run), tmp_path / "cache")
    ours = rows(run)
    made = model_of_run(str(run), 3)
    before = (lambda name: made.workload.initial(name, 0), made.read)
    generated: list[list[int]] = []
    prompts: list[str] = []
    for step, read in zip((1, 4), before, strict=True):
        generated += [
            answer.tokens for answer in drawn_again(run, with_weights(made.workload, read), made, step)
        ]
        prompts += [line["prompt"] for line in read_kept(str(run), step)[1][::GROUP]]
    config = GRPOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=16, num_generations=GROUP, num_iterations=3,
        max_steps=6, max_completion_length=8, learning_rate=3e-3, adam_beta2=0.95, adam_epsilon=1e-4, weight_decay=0.0,
        lr_scheduler_type="constant", max_grad_norm=1.0, loss_type="grpo", epsilon=0.02, epsilon_high=0.05,
        shuffle_dataset=False, logging_steps=1, save_strategy="no", bf16=False, gradient_checkpointing=False,
        report_to=[], use_cpu=True,
    )  # fmt: skip

    def even(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / 8 for text in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=even,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
        processing_class=tokenizer,
    )
    losses: list[float] = []
    compute = trainer._compute_loss

    def computed(*given: Any) -> torch.Tensor:
        loss = compute(*given)
        losses.append(loss.item())
        return loss

    def answered(prompt_ids: list[list[int]], *_: Any, **more: Any) -> tuple[list[list[int]], None]:
        texts = [tokenizer.decode(ids) for ids in prompt_ids]
        first = prompts.index(texts[0]) * GROUP
        assert texts == [prompts[(first + number) // GROUP] for number in range(16)]
        return generated[first : first + 16], None

    trainer._compute_loss = computed
    trainer._generate_single_turn = answered
    trainer.train()
    assert [row["loss"] for row in ours] == pytest.approx(losses, abs=1e-5)
    theirs = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=1e-3)
    clipped = [row["clip_ratio/region_mean"] for row in theirs]
    assert [row["clip_share"] for row in ours] == pytest.approx(clipped, abs=1e-4)
    assert [row["clip_share"] > 0 for row in ours] == [False, True, True] * 2
    trainer.model.save_pretrained(tmp_path / "trained")
    trained = load(f"hf:{tmp_path / 'trained'}", "grpo", KNOWN, sequence_length=32)
    store = Store(str(run / "checkpoints"))
    reader = store.reader(store.manifest(6))
    for name in trained.shapes:
        assert torch.allclose(reader.read(f"model.{name}"), trained.initial(name, 0), atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"zero": 3}, {"zero": 1}], ids=str)
def test_every_layout_takes_the_same_updates_on_the_same_answers(
    parallel: dict[str, int], quiet_repeated: Path, place: Path, tmp_path: Path
) -> None:
    """A kill in the middle of the second rollout does not change them either."""
    found = repeated(place)
    found["parallel"] |= parallel
    run = run_of(tmp_path, "run", found, faults=("kill@1:7",))
    for row, quiet_row in zip(rows(run), rows(quiet_repeated), strict=True):
        assert row["samples"] == quiet_row["samples"]
        assert row["loss"] == pytest.approx(quiet_row["loss"], abs=1e-5)
        assert row["clip_share"] == pytest.approx(quiet_row["clip_share"], abs=0.01)
    stores = [Store(str(each / "checkpoints")) for each in (run, quiet_repeated)]
    ours, quiet_ones = (store.reader(store.manifest(STEPS)) for store in stores)
    for name in quiet_ones.manifest.tensors:
        if name.startswith("model."):
            assert torch.allclose(ours.read(name), quiet_ones.read(name), atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2])
def test_any_number_of_rollout_workers_serves_several_updates_with_the_same_bits(
    most: int, quiet_repeated: Path, place: Path, tmp_path: Path
) -> None:
    found = repeated(place)
    found["rollout"]["workers"] = {"min": 1, "max": most}
    gang = with_rollout_workers([3], faults=("kill@0:2",))
    run = run_of(tmp_path, "run", found, gang=gang, faults=("kill@1:6",))
    same(run, quiet_repeated)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random_change_no_bit_of_several_updates(
    seed: int, quiet_repeated: Path, place: Path, tmp_path: Path
) -> None:
    """Four kills of ranks, most of them within a rollout, and two of rollout workers."""
    draw = random.Random(seed)
    steps = sorted(draw.randrange(1, STEPS + 1) for _ in range(4))
    of_ranks = tuple(
        f"kill@{draw.randrange(2)}:{step}/{attempt}" for attempt, step in enumerate(steps, start=1)
    )
    of_workers = tuple(f"{draw.choice(('kill', 'raise'))}@0:{draw.randrange(1, 5)}" for _ in range(2))
    gang = with_rollout_workers([draw.choice((3, 4)) for _ in range(8)], faults=of_workers)
    found = repeated(place)
    found["rollout"]["workers"] = {"min": 1, "max": 2}
    run = run_of(tmp_path, "run", found, gang=gang, faults=of_ranks)
    same(run, quiet_repeated)
    assert sum(bool(event.get("first_fault")) for event in rows(run, "events.jsonl")) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_several_updates_on_stale_answers_have_the_same_bits_after_kills(
    workers: int, place: Path, tmp_path: Path
) -> None:
    """The answers of the second rollout come from the initial weights, and wait in the commit of step 4."""
    runs = []
    for name, faults in (("quiet", ()), ("killed", ("kill@1:3", "kill@0:6/2"))):
        found = repeated(place)
        found["rollout"]["staleness"] = 1
        gang = None
        if workers and faults:
            found["rollout"]["workers"] = {"min": 1, "max": workers}
            gang = with_rollout_workers([3])
        runs.append(run_of(tmp_path, name, found, faults=faults, **({"gang": gang} if gang else {})))
    same(runs[1], runs[0])
    found_rows = rows(runs[0])
    assert [row["rollout_version"] for row in found_rows] == [0] * STEPS
    assert [row["rollout_epoch"] for row in found_rows] == [1, 1, 2, 2] * 2
    assert [row["clip_share"] > 0 for row in found_rows] == [False] + [True] * 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "kind"), [("fp32", ""), ("bf16", ""), ("bf16", "lora"), ("fp32", "dora")]
)
def test_several_updates_have_the_same_bits_at_every_width_where_bits_are_asked_for(
    precision: str, kind: str, place: Path, quiet: Path, tmp_path: Path
) -> None:
    adapted = {"init_from": f"{quiet}@{STEPS}", "adapter": {"kind": kind, "rank": 4, "alpha": 8}}
    runs = []
    for width in (1, 2):
        found = repeated(place, determinism="bitwise", virtual_shards=4, precision=precision)
        found["parallel"]["micro_batch"] = 4
        found["workload"] |= adapted if kind else {}
        runs.append(run_of(tmp_path, f"width{width}", found, gang=lambda width=width: LocalGang([width])))
    same(runs[1], runs[0])
    # Only the first update of a rollout has the weights that generated it.
    assert [row["sampler_difference"] for row in rows(runs[0])[::4]] == [0.0, 0.0]


@pytest.mark.slow
def test_reinforce_repeats_its_gradient_at_newer_weights(place: Path, tmp_path: Path) -> None:
    found = repeated(place)
    found["workload"] |= {"objective": "reinforce", "options": {}}
    run = run_of(tmp_path, "run", found, faults=("kill@1:3",))
    assert all(row["clip_share"] == 0 for row in rows(run))
    losses = [row["loss"] for row in rows(run)]
    assert len(set(losses)) == STEPS
    assert rows(run)[-1]["reward"] > rows(run)[0]["reward"]


@pytest.mark.slow
def test_an_instability_in_a_later_epoch_leaves_out_the_samples_of_its_step(
    place: Path, tmp_path: Path
) -> None:
    """Step 4 trains on the second batch again. The next attempt reads the batch after it in its place."""
    found = repeated(place)
    found["checkpoint"]["keep"] = 3
    run = run_of(tmp_path, "run", found, faults=("nan@0:4",))
    skipped = [event["skipped"] for event in rows(run, "events.jsonl") if event.get("skipped")]
    assert [(skip["start"], skip["count"]) for skip in skipped] == [(4, 4)]
    numbers = [{line["prompt_number"] for line in read_kept(str(run), step)[1]} for step in range(1, 9)]
    batches = [set(range(first, first + 4)) for first in (0, 8, 0, 8, 12, 16, 12, 16)]
    assert numbers == batches


def test_a_stop_within_a_rollout_waits_for_its_end(place: Path, tmp_path: Path) -> None:
    found = document(place)
    found["rollout"] |= {"steps": 4}
    found["checkpoint"]["every"] = 4
    controller = controller_here(found, str(tmp_path / "run"), place / "cache", until=2)
    assert controller.drive()["step"] == 4


@pytest.mark.slow
def test_a_plateau_within_a_rollout_waits_for_its_end(place: Path, tmp_path: Path) -> None:
    """A commit within it would have no answers for the next attempt, here one with more patience."""
    found = repeated(place)
    found["evaluate"]["every"] = 1
    for patience, last in ((1, 4), (30, STEPS)):
        found["stop_when"] = {"metric": "validation.reward", "patience": patience, "min_delta": 10.0}
        assert drive_here(found, str(tmp_path / "run"), place / "cache")["step"] == last


def test_a_reward_model_of_this_project_scores_the_answers(place: Path, tmp_path: Path) -> None:
    pairs = [{"q": letters(n), "good": letters(n + 1), "bad": letters(n + 1)[::-1]} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    judge = job(str(tmp_path / "pairs.jsonl"), steps=4, optimizer={"lr": 1e-2, "schedule": "constant"})
    judge["workload"] = {"model": "gpt-tiny", "changes": SMALL, "objective": "reward"}
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    judge["data"] = {
        "sources": [{"uri": str(tmp_path / "pairs.jsonl"), "field": columns}],
        "tokenizer": str(place), "sequence_length": 64,
    }  # fmt: skip
    run_of(tmp_path, "judge", judge)
    found = document(place)
    found["rewards"] = [
        {"model": f"{tmp_path}/judge"},
        {"kind": "length", "length": {"most": 4}, "weight": 0.1},
    ]
    with pytest.raises(InputError, match="may mean another checkpoint later; name its step"):
        check_reward_models(parse(found).rewards)
    found["rewards"][0]["model"] += "@4"
    check_reward_models(parse(found).rewards)
    run = run_of(tmp_path, "run", found)
    model = model_of_run(str(tmp_path / "judge"), 4)
    scores = with_weights(model.workload, model.read)
    tokenizer = model.tokens.tokenizer()
    compared = 0
    for line in read_kept(str(run), 8)[1]:
        said = tokenizer.encode(line["answer"], add_special_tokens=False).ids
        if len(said) + line["ended"] != line["tokens"]:
            continue  # the text leaves out special tokens, which a random model draws too
        compared += 1
        ids = tokenizer.encode(line["prompt"] + " " + line["answer"], add_special_tokens=False).ids
        ids += [tokenizer.token_to_id("<|endoftext|>")] * line["ended"]
        said = scores({"tokens": torch.tensor([ids]), ANSWER_ENDS: torch.tensor([[len(ids) - 1]])}).sentence
        assert line["rewards"]["model"] == pytest.approx(said.item(), abs=1e-4)
        assert line["reward"] == pytest.approx(
            line["rewards"]["model"] + 0.1 * (line["tokens"] <= 4), abs=1e-6
        )
    assert compared > 2


@pytest.mark.slow
def test_faults_at_random_change_no_answer_and_no_bit(quiet: Path, place: Path, tmp_path: Path) -> None:
    """Each round kills ranks of a run on two ranks a few times, within steps and within evaluations."""
    draw = random.Random(5)
    for number in range(12):
        places = sorted({(draw.randrange(1, STEPS), draw.random() < 0.2) for _ in range(4)})
        faults = tuple(
            f"kill@{draw.randrange(2)}:{4 if is_late else step}{'e' if is_late else ''}/{attempt}"
            for attempt, (step, is_late) in enumerate(places, start=1)
        )
        run = run_of(tmp_path, f"run{number}", document(place), faults=faults)
        assert curve(run) == curve(quiet), faults
        assert weights(run, STEPS) == weights(quiet, STEPS), faults
        assert answers(run, 8) == answers(quiet, 8), faults


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout_with_the_answers_of_its_next_step(
    quiet: Path, place: Path, tmp_path: Path
) -> None:
    """From the same weights, so that rounding has changed nothing yet."""
    run = tmp_path / "run"
    found = document(place)
    found["rollout"]["keep_every"] = 1
    found["checkpoint"]["every"] = 4
    controller_here(found, str(run), place / "cache", until=4).drive()
    before = answers(run, 4)
    found["parallel"] |= {"tp": 2}
    controller_here(found, str(run), place / "cache").drive()
    assert before == answers(quiet, 4)
    assert rows(run)[-1]["step"] == STEPS
    assert "tp2" in rows(run)[-1]["layout"]
    twin = tmp_path / "twin"
    kept = document(place)
    kept["rollout"]["keep_every"] = 1
    run_of(tmp_path, "twin", kept)
    assert answers(run, 5) == answers(twin, 5)


def test_what_has_learnt_leaves_as_a_language_model(quiet: Path, tmp_path: Path) -> None:
    made = model_of_run(str(quiet), STEPS)
    written = export_here(made, tmp_path / "export")
    assert written is not None
    assert written < 1e-4
    assert json.loads((tmp_path / "export/config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.slow
def test_rewards_that_take_longer_than_a_step_may_are_no_hang(
    quiet: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gang on processors may go ten seconds without a step; these rewards take longer, in the middle of a run."""
    monkeypatch.setattr(device_limits, "CPU", dataclasses.replace(device_limits.CPU, hang=3.0))
    found = document(place)
    found["train"]["steps"] = 4
    found["rewards"].append({"own": "judges:slow", "weight": 1e-9, "timeout": 60})
    run = run_of(tmp_path, "run", found, gang=lambda: LocalGang([1]))
    assert {row["attempt"] for row in rows(run)} == {1}
    assert max(row["reward_seconds"] for row in rows(run)) > 3.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"zero": 3}, {}, {"tp": 2}],
    ids=str,
)
def test_an_adapter_over_a_base_is_what_generates(
    parallel: dict[str, Any], place: Path, quiet: Path, tmp_path: Path
) -> None:
    """The copy that generates has the base's weights and the adapter's, or its probabilities would be others."""
    found = document(place)
    found["workload"] |= {"init_from": f"{quiet}@{STEPS}", "adapter": {"kind": "lora", "rank": 4, "alpha": 8}}
    found["parallel"] |= parallel
    found["resources"]["workers"]["min"] = 2
    run = rows(run_of(tmp_path, "run", found))
    assert all(row["sampler_difference"] < 1e-5 for row in run)
    assert run[0]["reward"] == pytest.approx(rows(quiet)[-1]["reward"], abs=0.2)
    assert run[-1]["reward"] > rows(quiet)[0]["reward"]


@pytest.mark.slow
def test_experts_generate_as_they_are_trained(place: Path, tmp_path: Path) -> None:
    found = document(place)
    found["workload"]["model"] = "mixtral-tiny"
    found["workload"]["changes"] = {
        **SMALL, "kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}, "initial_std": 0.1
    }  # fmt: skip
    run = rows(run_of(tmp_path, "run", found))
    assert all(row["sampler_difference"] < 1e-4 for row in run)
    assert run[-1]["reward"] > run[0]["reward"]


def test_messages_are_prompts_by_the_chat_template_and_the_temperature_is_that_of_the_loss(
    place: Path, tmp_path: Path
) -> None:
    """Where bits are asked for, so that generated and trained probabilities are equal."""
    write_tokenizer(tmp_path)
    asked = [{"talk": [{"role": "user", "content": letters(n)}]} for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    found = document(place)
    found["data"] |= {
        "sources": [{"uri": str(tmp_path / "prompts.jsonl"), "field": {"prompt": "talk"}}],
        "tokenizer": str(tmp_path),
    }
    found["rollout"] |= {"temperature": 0.7, "stop": ["b a"]}
    found["train"] |= {"determinism": "bitwise", "virtual_shards": 8}
    run = run_of(tmp_path, "run", found)
    lines = read_kept(str(run), 1)[1]
    assert all(line["prompt"].endswith("<|endoftext|> assistant :") for line in lines)
    assert all(line["prompt"].startswith("user : ") for line in lines)
    assert [row["sampler_difference"] for row in rows(run)] == [0.0] * STEPS
    late = [line["answer"] for line in read_kept(str(run), 8)[1]]
    assert all("b a" not in answer or answer.endswith(("b a", "b assistant")) for answer in late)


@pytest.mark.slow
def test_prompts_that_leave_no_room_keep_their_end_and_are_counted(place: Path, tmp_path: Path) -> None:
    found = document(place)
    found["data"]["sequence_length"] = 16
    found["rollout"]["max_tokens"] = 8
    run = run_of(tmp_path, "run", found)
    whole = {line["prompt"] for line in read_kept(str(run), 1)[1]}
    assert max(len(text.split()) for text in whole) == 8
    asked = [json.loads(line)["question"] for line in (place / "prompts.jsonl").read_text().splitlines()]
    assert all(any(question.endswith(text) for question in asked) for text in whole)
    told = " ".join(str(event) for event in rows(run, "events.jsonl"))
    long = sum(len(question.split()) > 8 for question in asked)
    assert "prompts are longer than 8 tokens" in told
    assert 0 < long < COUNT


@pytest.mark.slow
def test_a_commit_is_evaluated_and_replayed_as_the_run_was(quiet: Path, place: Path) -> None:
    """It has the weights of its step: asked for in NeMo-RL#3312."""
    run, store = RunDir(str(quiet)), Store(str(quiet / "checkpoints"))
    spec = parse(document(place))
    row = evaluate_commit(spec, run, store.manifest(STEPS), {})
    last = rows(quiet, "evals.jsonl")[-1]["sets"]["validation"]
    assert row["sets"]["validation"] == pytest.approx(last, rel=1e-6)
    result = replay(spec, run, None, 2)
    assert result.same, result.line


@pytest.mark.slow
def test_a_stale_run_is_replayed_with_the_answers_of_its_commit(quiet_stale: Path, place: Path) -> None:
    found = stale(place)
    found["rollout"]["keep_every"] = 1
    found["checkpoint"] |= {"every": 1, "keep": STEPS}
    result = replay(parse(found), RunDir(str(quiet_stale)), 4, 2)
    assert result.same, result.line
