"""Rewards in processes: their values, their limits, and that nothing is left of them."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.rewards import scorer as module
from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.scorer import Answer, RewardFailure, Scorer, weighted

HERE = str(Path(__file__).parent)
MARK = "REWARDS_OF_THIS_TEST"


def answer(number: int, text: str = "", k: int = 0, **columns: Any) -> Answer:
    return Answer(3, number, k, f"question {number}", text, len(text), columns)


def own(function: str, **more: Any) -> RewardSpec:
    return RewardSpec(own=f"own_rewards:{function}", **more)


def scored(
    specs: list[RewardSpec], answers: list[Answer], processes: int = 1
) -> tuple[list[dict[str, float]], list[RewardFailure]]:
    with Scorer(specs, [HERE], processes) as scorer:
        return scorer.score(answers), scorer.failures


def one(spec: RewardSpec, *answers: Answer) -> tuple[list[float], list[str]]:
    values, failures = scored([spec], list(answers) or [answer(0, "a")])
    return [each[spec.title] for each in values], [str(failure) for failure in failures]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A temporary folder; processes that the test starts are known by it, and none may be left."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path
    assert left_after(10.0, tmp_path) == []


def left(folder: Path) -> list[int]:
    """The processes, zombies not included, with the mark or within the folder."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
            place = os.readlink(f"/proc/{name}/cwd")
        except OSError:
            continue
        if f"{MARK}={folder}".encode() in environment.split(b"\0") or place.startswith(str(folder)):
            found.append(int(name))
    return [pid for pid in found if pid != os.getpid()]


def left_after(seconds: float, folder: Path) -> list[int]:
    deadline = time.monotonic() + seconds
    while (found := left(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_an_own_function_gets_what_it_names() -> None:
    specs = [own("size"), own("only_label"), own("reference")]
    answers = [answer(1, "ab", label="a", answer="ab"), answer(2, "a", label="b", answer="ab")]
    values, failures = scored(specs, answers)
    # "question 1" has 10 characters; the column called answer is not passed beside the answer itself
    assert values == [
        {"size": 10.0 + 20 + 100, "only_label": 1.0, "reference": 1.0},
        {"size": 10.0 + 10 + 100, "only_label": 0.0, "reference": 0.0},
    ]
    assert failures == []


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raises", "raised ValueError: cannot read a (own_rewards.py:"),
        ("leaves", "raised SystemExit: 0 (own_rewards.py:"),
        ("hogs", "needs more than its memory limit"),
        ("nan", "returned nan"),
        ("infinite", "returned -inf"),
        ("nothing", "returned None, which is not a number"),
        ("text", "returned a str '1.0', which is not a number"),
        ("kills_itself", "ended its process by SIGKILL"),
        ("ends_itself", "ended its process with 3"),
    ],
)
def test_a_failure_is_told_and_does_what_the_job_says(function: str, told: str, marked: Path) -> None:
    good = own("size")
    numbered = [answer(7, "a"), answer(8, "a", k=2)]
    zero, failures = scored([own(function, on_error="zero"), good], numbered)
    assert [each[function] for each in zero] == [0.0, 0.0]
    assert [each["size"] for each in zero] == [20.0, 20.0]
    assert [(each.step, each.prompt_number, each.k, each.name) for each in failures] == [
        (3, 7, 0, function),
        (3, 8, 2, function),
    ]
    assert all(told in each.problem and "\n" not in each.problem for each in failures)
    skipped, _ = scored([own(function, on_error="skip"), good], numbered)
    assert all(math.isnan(each[function]) for each in skipped)
    with pytest.raises(InputError) as caught:
        scored([good, own(function)], numbered)
    line = str(caught.value)
    assert line.startswith(f"rewards.1: {function} ")
    assert told in line
    assert line.endswith("at prompt 7 (step 3, answer 0); fix it, or set on_error to zero or skip")


def test_what_ran_out_of_memory_begins_anew(marked: Path) -> None:
    """Three times 300 MiB fit into a GiB. The fourth does not, and leaves no less for the fifth."""
    values, failures = one(own("keeps", on_error="zero"), *map(answer, range(5)))
    assert values == [1.0, 2.0, 3.0, 0.0, 1.0]
    assert failures == ["keeps needs more than its memory limit at prompt 3 (step 3, answer 0)"]


def test_a_function_that_hangs_costs_its_time_limit(marked: Path) -> None:
    """Asked for in AReaL#1426."""
    before = time.monotonic()
    values, failures = scored(
        [own("hangs", timeout=0.5, on_error="zero"), own("size")], [answer(0, "a"), answer(1, "a")], 2
    )
    assert time.monotonic() - before < 60  # it would sleep for 1000 s
    assert [each["hangs"] for each in values] == [0.0, 0.0]
    assert [each["size"] for each in values] == [20.0, 20.0]
    assert {each.problem for each in failures} == {"took longer than 0.5 s"}


def test_what_is_printed_does_not_reach_the_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    assert one(own("prints"), answer(0), answer(1)) == ([1.0, 1.0], [])
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count('{"value": 7}') == err.count('{"value": 9}') == 2


def test_of_a_flood_of_output_only_the_beginning_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """The log of a rank is in memory until it is copied, and no limit of the process counts it."""
    assert one(own("floods", timeout=300.0), answer(0, "a"), answer(1, "b")) == ([1.0, 1.0], [])
    err = capfd.readouterr().err
    assert "begin a\n" in err
    assert "begin b\n" in err
    assert err.count("the rest is left out") == 2
    assert len(err) < 2**18


def test_there_is_nothing_to_read() -> None:
    assert one(own("reads")) == ([0.0], [])


def test_both_copies_of_a_fork_may_return(marked: Path) -> None:
    answers = [answer(number, str(number)) for number in range(5)]
    assert one(own("forks"), *answers) == ([0.0, 1.0, 2.0, 3.0, 4.0], [])


def test_a_daemon_does_not_outlive_its_answer(marked: Path) -> None:
    with Scorer([own("leaves_a_daemon")], [HERE], 1) as scorer:
        assert scorer.score([answer(n) for n in range(3)]) == [{"leaves_a_daemon": 1.0}] * 3
        assert len(left(marked)) == 2  # the worker, and the process of the function


def test_a_daemon_of_what_hangs_is_killed_with_it(marked: Path) -> None:
    values, failures = one(own("daemon_and_hang", timeout=1.0, on_error="zero"))
    assert (values, len(failures)) == ([0.0], 1)


@pytest.mark.parametrize("function", ["once_killed", "kills_its_worker"])
def test_an_answer_whose_process_was_killed_is_scored_again(function: str, marked: Path) -> None:
    assert one(own(function), answer(0, "a", mark=str(marked / "mark"))) == ([1.0], [])


def test_any_number_of_processes_gives_the_same(marked: Path) -> None:
    names = "size drawn from_set raises_on_odd"
    specs = [own(name, on_error="skip") for name in names.split()]
    specs += [RewardSpec(kind="exact_match"), RewardSpec(kind="unit_tests")]
    answers = [answer(n, str(n), answer="3", tests=[f"assert {n} < 5"]) for n in range(12)]
    alone, together = scored(specs, answers, 1), scored(specs, answers, 4)
    assert repr(alone) == repr(together)
    backwards = scored(specs, answers[::-1], 3)
    assert repr(backwards[0][::-1]) == repr(alone[0])
    assert [each["unit_tests"] for each in alone[0]] == [1.0] * 5 + [0.0] * 7
    assert len({each["drawn"] for each in alone[0]}) == 12


def test_answers_are_scored_at_the_same_time(marked: Path) -> None:
    """The reward of each answer waits for those of two others. Requests: verl#1962, verl#2236."""
    meeting = marked / "meeting"
    meeting.mkdir()
    answers = [answer(number, str(number), meeting=str(meeting)) for number in range(3)]
    values, failures = scored([own("meets_two_others", timeout=60.0)], answers, 3)
    assert (values, failures) == ([{"meets_two_others": 1.0}] * 3, [])


def test_the_first_failure_stops_whatever_is_slower(marked: Path) -> None:
    specs = [own("raises_on_odd")]
    answers = [answer(n, "1" if n in (5, 6, 9) else "0") for n in range(12)]
    for processes in (1, 4):
        with Scorer(specs, [HERE], processes) as scorer:
            for _ in range(2):
                with pytest.raises(InputError, match="at prompt 5 "):
                    scorer.score(answers)
            assert scorer.score(answers[:5]) == [{"raises_on_odd": 1.0}] * 5
            assert scorer.failures == []


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (own("absent"), "absent: own_rewards has no absent; name something in"),
        (RewardSpec(own="absent_module:f"), "there is no module absent_module in"),
        (own("not_callable"), "own_rewards:not_callable is not a function; name one as module:function"),
        (
            own("unknown"),
            "unknown takes solution, which is not a column of the prompts (they have: answer)",
        ),
        (
            RewardSpec(kind="exact_match", column="label"),
            "the prompts have no column label (they have: answer)",
        ),
        (RewardSpec(kind="unit_tests"), "the prompts have no column tests (they have: answer)"),
        (own("size", memory=0.001), "memory"),
    ],
)
def test_a_reward_that_can_score_nothing_always_stops(spec: RewardSpec, told: str, marked: Path) -> None:
    for on_error in ("stop", "zero"):
        changed = spec.model_copy(update={"on_error": on_error})
        with pytest.raises(InputError) as caught:
            scored([changed], [answer(0, answer="a")])
        assert str(caught.value).startswith("rewards.0: ")
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_library_is_told_before_anything_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    told = r"rewards.0: kind: math needs math-verify; pip install -e '.\[rl\]' in the checkout"
    with pytest.raises(InputError, match=told):
        Scorer([RewardSpec(kind="math")])


def test_a_value_that_cannot_be_computed_is_wrong() -> None:
    hard = answer(0, "$9^{9^{9^{9}}}$", answer="4")
    values, failures = one(RewardSpec(kind="math", timeout=3.0), hard, answer(1, "$4$", answer="4"))
    assert values == [0.0, 1.0]
    assert failures == ["math took longer than 3 s at prompt 0 (step 3, answer 0)"]


def test_rewards_by_a_model_are_left_to_others() -> None:
    specs = [RewardSpec(model="runs/a"), RewardSpec(kind="regex", pattern="a")]
    assert scored(specs, [answer(0, "a")])[0] == [{"regex": 1.0}]


def test_nothing_starts_before_it_is_needed(marked: Path) -> None:
    scorer = Scorer([own("size")], [HERE])
    assert scorer.score([]) == []
    assert left(marked) == []
    scorer.score([answer(0)])
    scorer.close()
    scorer.close()
    assert scorer.score([answer(0, "a")]) == [{"size": 20.0}]
    scorer.close()


def test_long_texts_pass(marked: Path) -> None:
    text = "ä\n" * 300_000
    values, _ = scored([own("size"), RewardSpec(kind="exact_match")], [answer(0, text, answer=text)] * 3, 2)
    assert values == [{"size": 10.0 + 10 * len(text), "exact_match": 1.0}] * 3


PARENT = """
import os, sys, time
from orchestrator.rewards.config import RewardSpec
from orchestrator.rewards.scorer import Answer, Scorer
specs = [RewardSpec(own="own_rewards:daemon_and_hang", timeout=600)] if sys.argv[1] == "own" else [
    RewardSpec(kind="unit_tests", timeout=600)]
code = "import os, time\\nif not os.fork():\\n    os.setsid()\\ntime.sleep(1000)"
answers = [Answer(0, n, 0, "", code, 0, {"tests": "assert 1"}) for n in range(2)]
Scorer(specs, [sys.argv[2]], 2).score(answers)
"""
BELOW = {"own": 2, "tests": 4}
"""Processes below a worker: the function and its daemon; two to isolate the code, the code and its daemon."""


@pytest.mark.parametrize("victim", ["parent", "worker"])
@pytest.mark.parametrize("kind", ["own", "tests"])
def test_nothing_outlives_who_was_killed(kind: str, victim: str, marked: Path) -> None:
    """A killed worker is replaced, and what it left behind is gone."""
    with subprocess.Popen([sys.executable, "-c", PARENT, kind, HERE]) as parent:
        try:
            before = wait_for_processes(3 + 2 * BELOW[kind], marked, parent)
            workers = [pid for pid in before if _parent(pid) == parent.pid]
            assert len(workers) == 2
            if victim == "worker":
                os.kill(workers[0], signal.SIGKILL)
                after = wait_for_processes(len(before), marked, parent, other_than=before)
                assert len(set(after) & set(before)) == len(before) - 1 - BELOW[kind]
        finally:
            parent.kill()
    assert left_after(20.0, marked) == []
    assert os.listdir(marked) == []


def wait_for_processes(
    number: int, folder: Path, parent: subprocess.Popen[bytes], other_than: Sequence[int] = ()
) -> list[int]:
    """That many processes, the same ones in two looks: a start forks processes that end at once."""
    deadline = time.monotonic() + 120
    found: list[int] = []
    while time.monotonic() < deadline:
        assert parent.poll() is None
        seen, found = found, left(folder)
        if len(found) == number and found == seen and found != list(other_than):
            return found
        time.sleep(0.5)
    raise AssertionError(f"{number} processes were waited for, {found} are there")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_copy_of_the_parent_keeps_nothing_alive(marked: Path) -> None:
    """A copy that was forked and holds the pipes, as a data loader is."""
    copied = PARENT.replace(
        "Scorer(specs, [sys.argv[2]], 2).score(answers)",
        "scorer = Scorer([RewardSpec(kind='regex', pattern='a')], [], 1)\n"
        "scorer.score(answers)\n"
        "if copy := os.fork():\n"
        "    print(copy, flush=True)\n"
        "time.sleep(1000)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", copied, "own", HERE], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        copy = int(parent.stdout.readline())
        try:
            parent.kill()
            deadline = time.monotonic() + 20
            while (found := left(marked)) != [copy] and time.monotonic() < deadline:
                time.sleep(0.05)
            assert found == [copy]
        finally:
            os.kill(copy, signal.SIGKILL)


def test_the_thread_that_started_the_workers_may_end(marked: Path) -> None:
    with Scorer([own("size")], [HERE], 1) as scorer:
        first = threading.Thread(target=scorer.score, args=[[answer(0)]])
        first.start()
        first.join()
        before = left(marked)
        assert scorer.score([answer(0, "a")]) == [{"size": 20.0}]
        assert left(marked) == before


def test_an_interruption_ends_the_workers(marked: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    scorer = Scorer([own("daemon_and_hang", timeout=600)], [HERE], 2)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        with pytest.raises(KeyboardInterrupt):
            scorer.score([answer(0), answer(1)])
        assert left_after(5.0, marked) == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        scorer.close()


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_replaced(marked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = own("size", timeout=1.0)
    with Scorer([spec], [HERE], 1) as scorer:
        scorer.score([answer(0)])
        (worker,) = [pid for pid in left(marked) if _parent(pid) == os.getpid()]
        os.kill(worker, signal.SIGSTOP)
        monkeypatch.setattr(module, "ANSWERS", 1.0)
        threading.Timer(2.5, monkeypatch.setattr, (module, "ANSWERS", 180.0)).start()
        values = scorer.score([answer(0, "a" * 1_000_000)])
        assert values == [{"size": 10.0 + 10_000_000}]
        assert worker not in left(marked)


def test_the_weighted_sum() -> None:
    specs = [
        RewardSpec(kind="exact_match", weight=2.0),
        RewardSpec(kind="regex", pattern="a", weight=-0.5),
    ]
    scores = [
        {"exact_match": 1.0, "regex": 1.0},
        {"exact_match": 0.0, "regex": 3.0},
        {"exact_match": math.nan, "regex": 1.0},
    ]
    sums = weighted(specs, scores)
    assert sums[:2] == [1.5, -1.5]
    assert math.isnan(sums[2])


@pytest.mark.parametrize("other", [1e308, -1e308])
def test_a_sum_that_is_too_large_is_refused(other: float) -> None:
    """Else infinity would be a reward, infinity minus infinity would leave the answer out, and a deviation that is
    infinite would make every advantage 0.
    """
    specs = [RewardSpec(kind="regex", pattern="a", name=name, weight=10.0) for name in ("one", "two")]
    with pytest.raises(InputError, match=r"sum of an answer's rewards is (inf|nan) \(one 1e\+308, two"):
        weighted(specs, [{"one": 1e308, "two": other}])
    with pytest.raises(InputError, match=r"sum of an answer's rewards is 1e\+300 \(one 1e\+299, two 0\)"):
        weighted(specs, [{"one": 1e299, "two": 0.0}])


def test_rules_that_need_no_limit_start_no_process_and_say_what_a_process_would() -> None:
    specs = [
        RewardSpec(kind="exact_match"),
        RewardSpec(kind="exact_match", pattern="(.+)", name="by_pattern"),
        RewardSpec(kind="length", length={"most": 3}),
    ]
    asked = [
        Answer(0, 0, k, "2 + 2?", text, len(text), {"answer": "4"}) for k, text in enumerate(["4", "four"])
    ]
    with Scorer([specs[0], specs[2]]) as scorer:
        at_once = scorer.score(asked)
        assert scorer._workers == []
        with pytest.raises(InputError, match=r"exact_match: the prompts have no column answer"):
            scorer.score([dataclasses.replace(asked[0], columns={"other": 1})])
    with Scorer(specs) as scorer:
        found = scorer.score(asked)
        assert scorer._workers
    assert at_once == [{key: each[key] for key in ("exact_match", "length")} for each in found]
    assert [each["by_pattern"] for each in found] == [each["exact_match"] for each in found] == [1.0, 0.0]
