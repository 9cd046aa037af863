from __future__ import annotations

import itertools
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.pieces import full_piece
from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
from orchestrator.observe.pages.layer_table import layer_table
from orchestrator.observe.pages.page import moment, size
from orchestrator.observe.pages.report import report
from orchestrator.observe.summary import summary
from orchestrator.observe.totals import MOST_LAYERS, tally
from orchestrator.parallel.layout import Layout
from orchestrator.storage.run_directory import RunDir

START = 1_767_225_600.0
STEPS, EVERY = 200, 20
MISCHIEF = "<script>alert('1')</script>"
FAULT = f"rank 1 on 10.0.0.7: Killed {MISCHIEF} s3://ann:hunter2@bucket"


def event(at: float, phase: str, attempt: int, step: int, reason: str = "", **more: Any) -> dict[str, Any]:
    return {"time": START + at, "phase": phase, "attempt": attempt, "step": step, "reason": reason, **more}


def rows(
    first: int, last: int, at: float, attempt: int, layout: Layout, seconds: float
) -> list[dict[str, Any]]:
    """Steps from `at` seconds on; a commit every EVERY steps stalls the next."""
    found = []
    for step in range(first, last + 1):
        stall = 0.6 if step % EVERY == 0 else 0.0
        wobble = 1 + 0.12 * math.sin(step * 1.7) * math.cos(step * 0.31)
        at += seconds * wobble + 0.02 + stall
        found.append(
            {
                "step": step, "time": START + at, "attempt": attempt, "layout": str(layout),
                "loss": 3.1 + 5.2 * math.exp(-step / 38) + 0.08 * math.sin(step * 2.3),
                "lr": 1e-3, "grad_norm": 0.6 + 2.5 * math.exp(-step / 15) + 0.2 * abs(math.sin(step * 0.9)),
                "tokens": step * 4096, "tokens_per_second": 4096 / (seconds * wobble),
                "step_seconds": seconds * wobble, "data_seconds": 0.02, "commit_seconds": stall,
                "samples": f"{step:032x}", "memory_bytes": 412_000_000,
            }
        )  # fmt: skip
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run of three attempts: a fault at step 72, its controller killed at step 131."""
    run_dir = RunDir(str(tmp_path / "gpt-shakespeare"))
    run_dir.create()
    spec = parse(
        {
            "name": "gpt-shakespeare",
            "seed": 17,
            "workload": {"model": "gpt-tiny"},
            "data": {
                "sources": [{"uri": "s3://ann:hunter2@bucket/*.txt"}],
                "tokenizer": {"train_bpe": 4096},
                "sequence_length": 128,
            },
            "train": {"steps": STEPS, "global_batch": 32, "optimizer": {"lr": 1e-3, "warmup": 20}},
            "resources": {"workers": {"min": 1, "max": 2}},
            "limits": {"usd_per_worker_hour": 2.5},
        }
    )
    two, one = Layout(dp=2, micro_batch=16), Layout(dp=1, micro_batch=16)
    events = [
        event(0, "prepare", 0, 0, "begun"),
        event(14, "start", 1, 0, "2 workers in fp32 from the beginning", layout_after=str(two)),
        event(22, "train", 1, 1, "the first step of attempt 1 is done"),
        event(
            84, "stop", 1, 72, "a fault ended the attempt", first_fault=FAULT, lost_steps=12, seconds_lost=8.6
        ),
        event(86, "wait", 1, 72, "1 of 2 workers: going on with one"),
        event(
            88,
            "start",
            2,
            60,
            "1 worker in fp32 from the commit at step 60",
            layout_before=str(two),
            layout_after=str(one),
        ),
        event(95, "train", 2, 61, "the first step of attempt 2 is done"),
        event(230, "prepare", 2, 120, "resumed", last_seen=START + 196),
        event(231, "start", 3, 120, "2 workers in fp32 from the commit at step 120", layout_after=str(two)),
        event(239, "train", 3, 121, "the first step of attempt 3 is done"),
        event(305, "export", 3, 200, "the commit at step 200, in the Hugging Face format"),
        event(311, "done", 3, 200, "all 200 steps are done"),
    ]
    metrics = (
        rows(1, 60, 21, 1, two, 0.72) + rows(61, 120, 93, 2, one, 1.36) + rows(121, 200, 238, 3, two, 0.74)
    )
    candidates = [
        {"layout": str(x), "memory_bytes": 3.8e8, "step_seconds": s} for x, s in ((two, 0.61), (one, 1.2))
    ]
    rejected = [
        {"layout": f"tp{n}", "reason": f"tp {n} does not divide the model's 2 attention heads"}
        for n in (3, 4)
    ]
    plan = {
        "chosen": {**two.to_json(), "text": str(two)},
        "predicted": {"memory_bytes": 3.8e8, "step_seconds": 0.61, "tokens_per_second": 6714.8},
        "candidates": candidates,
        "rejected": [*rejected, {"layout": "tp2", "reason": MISCHIEF}],
    }
    store = Store(run_dir.at("checkpoints"))
    for step in (160, 180, 200):
        records = store.write_shard(step, 0, [full_piece("model.w", torch.zeros(64, 8))])
        store.publish(step, records, {"position": step * 32, "receipt": f"{step:032x}"})
    run_dir.write_text("job.yaml", dump(spec))
    run_dir.write_json("plan.json", plan)
    run_dir.append("events.jsonl", events)
    run_dir.append("metrics.jsonl", metrics)
    sample = f"ROMEO: What light {MISCHIEF}\nis that which breaks?"
    run_dir.write_json(
        "summary.json",
        summary(
            spec.summarised,
            plan,
            events,
            tally(events, reversed(metrics)),
            unigram_entropy=6.214,
            sample=sample,
        ),
    )
    return run_dir


class Page(HTMLParser):
    """Collects the tags, their attributes and the text, and checks that tags are closed in order."""

    VOID = frozenset({"meta", "link", "img", "br", "line", "rect", "path", "circle", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and name in [*(a.get("class") or "").split(), ""]]


def test_the_page_tells_the_run(run_dir: RunDir) -> None:
    page = Page(report(run_dir))
    for told in (
        "gpt-shakespeare", "done", "all 200 steps are done", "200 / 200", "819k tokens",
        "12 steps lost", "3 rejected",
        "unigram entropy 6.214", "dp2 zero0 mb16", "tp 3 does not divide the model's 2 attention heads",
        "ROMEO: What light", "work that was lost", "noticing faults", "no controller ran", "train_bpe: 4096",
        "the commit at step 200, in the Hugging Face format", f"{200:032x}", "6400",
    ):  # fmt: skip
        assert told in page.text, told
    assert [tag["class"] for tag in page.of("path")] == [
        "line loss",
        "line tokens_per_second",
        "line grad_norm",
    ]
    assert len(page.of("rect", "band")) == 1, "the steps lost to the fault"
    assert len(page.of("line", "level")) == 1, "the unigram entropy"
    assert [text for text in ("attempt 2", "attempt 3") if text in page.text] == ["attempt 2", "attempt 3"]
    assert len(page.of("rect", "b-down")) == 1, "the controller was gone once"
    assert len(page.of("rect", "b-step")) == 3


def test_training_and_held_out_text_are_in_one_plot(run_dir: RunDir) -> None:
    """A line for each set, in the colours of its label, and a table of all metrics."""
    found = rows(201, 204, 900, 3, Layout(dp=2, micro_batch=16), 0.5)
    for number, line in enumerate(found):
        sets = {"validation": {"loss": 3.5 - number / 8, "bits_per_byte": 1.25, "tokens": 12_345.0}}
        sets |= {"wiki": {"loss": 4.5}} if number else {}
        line["evaluations"] = [
            {"step": line["step"], "attempt": 3, "time": START, "seconds": 1.0, "sets": sets}
        ]
    run_dir.append("metrics.jsonl", found)
    page = Page(report(run_dir))
    assert [tag["class"] for tag in page.of("path")][:3] == [
        "line held-out h0",
        "line held-out h1",
        "line loss",
    ]
    assert [tag["class"] for tag in page.of("i", "dot")][:4] == ["dot loss", "dot h0", "dot h1", "dot level"]
    assert "trainingvalidationwikiunigram entropy 6.214" in page.text, (
        "the keys are beside the plot, not in it"
    )
    for told in ("Held-out text", "bits per byte", "1.2500", "12,345", "3.1250", "4.5000"):
        assert told in page.text, told


@pytest.mark.parametrize(
    ("objective", "read", "unit", "counted"),
    [
        ("sequence_classification", {"text": "t", "label": "l"}, "nats per record", "records"),
        ("dpo", {"chosen": "c", "rejected": "r"}, "nats per pair", "pairs"),
    ],
)
def test_a_loss_that_is_not_of_text_is_not_set_against_its_entropy(
    objective: str, read: dict[str, str], unit: str, counted: str, run_dir: RunDir
) -> None:
    """It would be below it from the first step on."""
    spec = read_job(run_dir)
    assert spec is not None
    document = spec.model_dump(mode="json")
    document["workload"]["objective"] = objective
    document["workload"]["options"] = {}
    document["data"]["sources"] = [{"uri": "x.jsonl", "field": read}]
    document["data"]["tokenizer"] = "t.json"
    if objective == "sequence_classification":
        document["data"]["labels"] = ["bad", "good"]
        document["workload"]["model"] = "bert-tiny"
    run_dir.write_text("job.yaml", dump(parse(document)))
    found = rows(201, 204, 900, 3, Layout(dp=2, micro_batch=16), 0.5)
    sets = {"validation": {"loss": 0.5, "tokens": 25.0}}
    found[-1]["evaluations"] = [{"step": 204, "attempt": 3, "time": START, "seconds": 1.0, "sets": sets}]
    run_dir.append("metrics.jsonl", found)
    page = Page(report(run_dir))
    assert "entropy" not in page.text.replace("entropy:", "")
    assert not page.of("line", "level")
    assert f"Loss{unit}, by step" in page.text
    assert f"Held-out {counted}" in page.text
    assert "nats per token" not in page.text


def test_what_the_model_says_is_shown_from_first_to_last(run_dir: RunDir) -> None:
    found = rows(201, 230, 900, 3, Layout(dp=2, micro_batch=16), 0.5)
    for line in found:
        texts = {"Once ": f"upon {line['step']}.", f"<{MISCHIEF}": "a\n<b>"}
        samples = [{"prompt": prompt, "text": text} for prompt, text in texts.items()]
        line["evaluations"] = [
            {
                "step": line["step"],
                "attempt": 3,
                "time": START,
                "seconds": 1.0,
                "sets": {},
                "samples": samples,
            }
        ]
    run_dir.append("metrics.jsonl", found)
    text = report(run_dir)
    page = Page(text)
    assert len(page.of("table", "said")) == 2
    shown = [step for step in range(1, 300) if f"upon {step}." in page.text]
    assert (shown[0], shown[-1], len(shown)) == (found[0]["step"], found[-1]["step"], 7)
    assert page.text.count("a↵ <b>") == 7
    assert "Held-out text" not in page.text
    assert MISCHIEF not in text


def test_nothing_comes_from_outside_and_nothing_runs(run_dir: RunDir) -> None:
    text = report(run_dir)
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe", "a")]
    assert not [a for _, a in page.tags if a.keys() & {"src", "href"}]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_text_is_escaped_and_secrets_are_hidden(run_dir: RunDir) -> None:
    text = report(run_dir)
    assert MISCHIEF not in text
    assert Page(text).text.count(MISCHIEF) == 3, "as text: in the fault, a reason of the plan and the sample"
    assert "hunter2" not in text
    assert "s3://ann:***@bucket" in text


def test_a_run_that_has_just_begun(run_dir: RunDir, tmp_path: Path) -> None:
    young = RunDir(str(tmp_path / "young"))
    young.create()
    young.write_text("job.yaml", str(run_dir.read_text("job.yaml")))
    assert "running" in Page(report(young)).text
    young.append("events.jsonl", [event(0, "prepare", 0, 0)])
    young.append(
        "metrics.jsonl", [{"step": 1, "loss": math.nan, "attempt": 1, "time": START + 3, "step_seconds": 1.0}]
    )
    page = Page(report(young))
    assert "No plan yet." in page.text
    assert page.of("path") == [], "a loss that is not a number has no curve"


def test_a_damaged_commit_is_told_and_not_hidden(run_dir: RunDir) -> None:
    manifest = Path(run_dir.path) / "checkpoints" / "step-00000180" / "manifest.json"
    manifest.write_text(json.dumps({"step": 180}))
    page = Page(report(run_dir))
    assert "damaged" in page.text
    assert "200 / 200" in page.text


def test_no_run_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        report(RunDir(str(tmp_path)))


def test_size_and_moment() -> None:
    assert [size(v) for v in (None, 12, 2048, 1010 * 2**10, 3.5 * 2**30, 2**41)] == [
        "unknown",
        "12 B",
        "2 KiB",
        "1010 KiB",
        "3.5 GiB",
        "2 TiB",
    ]
    assert moment(START) == "2026-01-01 00:00:00 UTC"


def test_statistics_by_layer_are_a_table_of_the_steps_that_have_them(run_dir: RunDir) -> None:
    """A step that was computed again counts once, and names come from a file."""
    every = 10
    written = run_dir.rows("metrics.jsonl")
    for row in written:
        if row["step"] % every == 0:
            row["layer_statistics"] = {
                MISCHIEF: {"weight_norm": row["step"] / 8, "gradient_norm": math.nan},
                "layers.0": {"activation_rms": 1.5},
            }
    found = layer_table(tally([], reversed(written)).layers)
    assert found is not None
    assert (found["first"], found["last"]) == (every, STEPS)
    assert found["titles"] == [
        "norm of the weights",
        "norm of the gradient",
        "root mean square of the output",
    ]
    (weight, bars), (gradient, none), _ = found["rows"][0]["cells"]
    assert (weight, gradient, none) == (STEPS / 8, None, "")
    assert (bars[0], bars[-1], len(bars)) == ("▁", "█", STEPS // every)
    Path(run_dir.uri, "metrics.jsonl").unlink()
    run_dir.append("metrics.jsonl", written)
    page = report(run_dir)
    assert "root mean square of the output" in page
    assert MISCHIEF not in page


def test_few_of_many_statistics_are_kept_at_like_distances() -> None:
    many = 1000
    layers = {"a": {"weight_norm": 1.0, "weight_histogram": {"-2": 3, "0": 1, "zero": 2}}}
    newest_first = [{"step": step, "attempt": 1, "layer_statistics": layers} for step in range(many, 0, -1)]
    kept = [step for step, _ in tally([], newest_first).layers]
    assert kept[0] == many
    assert len(kept) <= MOST_LAYERS
    assert len({a - b for a, b in itertools.pairwise(kept)}) == 1
    found = layer_table([(many, layers)])
    assert found is not None
    assert found["rows"][0]["histograms"] == ["2^-2 █▁▃ 2^0, 2 zero"]
