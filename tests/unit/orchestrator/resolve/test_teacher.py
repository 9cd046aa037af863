"""Which teachers fit a student, and what is said of others before anything starts; what a plan counts for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from base_run import save_class, save_dense
from letters import WORDS, write_tokenizer
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.config.paths import resolve_paths
from orchestrator.config.spec import JobSpec, parse
from orchestrator.launch.job_checks import check_job
from orchestrator.models.teacher_weights import check_tokens
from orchestrator.parallel.layout import Layout
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import BOUNDLESS
from orchestrator.planner.memory import rank_memory
from orchestrator.planner.planner import planned
from orchestrator.planner.simulation.operators import ends, layer
from orchestrator.planner.trace.layout_memory import check_fits
from orchestrator.resolve.resolved_job import resolve
from orchestrator.train.distillation.config import TeacherWorkers

ROWS = len(WORDS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, a decoder and two classifiers."""
    folder = tmp_path_factory.mktemp("teachers")
    write_tokenizer(folder)
    (folder / "rows.jsonl").write_text(json.dumps({"text": "a b", "label": "x"}) + "\n")
    save_dense(folder / "gpt", ROWS, n_embd=48, n_layer=4)
    save_dense(folder / "other", ROWS + 3)
    save_class(folder / "class", ROWS)
    save_bert(folder / "classes", ["x", "y"])
    save_bert(folder / "strange", ["x", "z"])
    save_bert(folder / "headless", None)
    return folder


def save_bert(folder: Path, labels: list[str] | None) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    named = {} if labels is None else {"id2label": dict(enumerate(labels))}
    config = BertConfig(vocab_size=ROWS, max_position_embeddings=64, **sizes, **named)
    (BertModel if labels is None else BertForSequenceClassification)(config).save_pretrained(folder)


def job(place: Path, teacher: str, *, classes: bool = False, **distill: Any) -> JobSpec:
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
    model = (
        {"model": "bert-tiny", "objective": "sequence_classification"} if classes else {"model": "gpt-tiny"}
    )
    field: Any = {"text": "text", "label": "label"} if classes else "text"
    found = parse({
        "name": "student",
        "workload": {**model, "changes": sizes},
        "data": {
            "sources": [{"uri": str(place / "rows.jsonl"), "field": field}], "tokenizer": str(place),
            "sequence_length": 16, "labels": ["x", "y"] if classes else [],
        },
        "train": {"steps": 4, "global_batch": 8, "optimizer": {"warmup": 0}},
        "resources": {"workers": {"min": 1, "max": 4}},
        "checkpoint": {"export": None},
        "distill": {"teacher": teacher, **distill},
    })  # fmt: skip
    return resolve_paths(found, place)


def refusal(spec: JobSpec) -> str:
    with pytest.raises(InputError) as raised:
        check_job(spec, machine_of=lambda *_: BOUNDLESS)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_teachers_that_fit_pass(place: Path) -> None:
    inside = {"hidden": {}, "relations": {"of": ["queries", "values"], "heads": 2}}
    for spec in (
        job(place, "hf:gpt"),
        job(place, "gpt"),
        job(place, "gpt", **inside),
        job(place, "hf:class"),
        job(place, "classes", classes=True),
    ):
        check_job(spec, machine_of=lambda *_: BOUNDLESS)


def test_vocabularies_of_other_sizes_are_refused(place: Path) -> None:
    said = refusal(job(place, "other"))
    assert (
        f"distill.teacher: {place / 'other'} predicts over {ROWS + 3} tokens, and the student over {ROWS}"
        in said
    )


def test_other_tokens_are_refused(place: Path, tmp_path: Path) -> None:
    """Two tokens of the teacher have changed places."""
    made = json.loads((place / "tokenizer.json").read_text())
    words = made["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps(made))
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    spec = job(place, "gpt")
    check_tokens(f"hf:{place / 'gpt'}", spec.workload, tokenizer)  # it names no tokens
    with pytest.raises(
        InputError, match=r"2 tokens of .* have other ids in the student's tokenizer, such as"
    ):
        check_tokens(str(folder), spec.workload, tokenizer)


def test_other_labels_and_no_head_are_refused(place: Path) -> None:
    said = refusal(job(place, "strange", classes=True))
    assert "distill.teacher: the head of" in said
    assert "predicts x, z, and data.labels names y" in said
    assert "has no weights for" in refusal(job(place, "headless", classes=True))


@pytest.mark.parametrize(
    ("teacher", "distill", "says"),
    [
        ("nowhere", {}, "has no commit, and is not an export"),
        ("hf:nowhere", {}, "distill.teacher"),
        ("gpt@5", {}, "is an export, which has no step"),
        ("hf:class", {"hidden": {}}, "runs as a class of transformers, whose layers are not compared"),
        (
            "gpt",
            {"hidden": {"layers": [[1, 9]]}},
            "distill.hidden.layers: names layer 9 of the teacher, which has 4",
        ),
        ("gpt", {"relations": {"layers": [[0, 0]]}}, "the embeddings, which have no attention"),
        ("gpt", {"relations": {"of": ["values"], "heads": 5}}, "heads 5 does not divide the 32 columns"),
    ],
)
def test_what_does_not_fit_is_told_with_its_key(
    place: Path, teacher: str, distill: dict[str, Any], says: str
) -> None:
    assert says in refusal(job(place, teacher, **distill))


def test_a_plan_refuses_layouts_that_the_teacher_forbids(place: Path) -> None:
    """Six heads of the teacher, four of the student."""
    shape = resolve(job(place, "gpt")).shape
    assert shape.teacher is not None
    narrow = replace(shape, teacher=replace(shape.teacher, heads=6, kv_heads=6))
    assert any("of distill.teacher: tp 4" in each for each in Layout(tp=4).problems(narrow, 8))
    assert Layout(tp=4).problems(shape, 8) == []
    assert any(
        "holds no teacher" in each for each in Layout(dp=2, zero=2, engine="deepspeed").problems(shape, 8)
    )
    inside = resolve(job(place, "gpt", hidden={})).shape
    for layout in (Layout(pp=2), Layout(cp=2)):
        assert any("compare whole layers of whole texts" in each for each in layout.problems(inside, 8))


def test_a_plan_counts_the_teachers_weights_and_its_forward_pass(place: Path) -> None:
    spec = job(place, "gpt")
    shape, demand = resolve(spec).shape, demand_of(spec)
    alone = replace(shape, teacher=None)
    assert shape.teacher is not None
    for layout, ways in ((Layout(micro_batch=2), 1), (Layout(dp=2, zero=3, micro_batch=2), 2)):
        with_teacher, without = (rank_memory(demand, each, layout, [0])[0].state for each in (shape, alone))
        logits = 4 * 2 * spec.data.sequence_length * shape.teacher.vocabulary
        assert with_teacher - without == pytest.approx(4 * shape.teacher.parameters / ways + logits)
    part = (2, 1, 1, 1, 0)
    times = [layer(each, BOUNDLESS, demand.program, part, "none") for each in (shape, alone, shape.teacher)]
    assert times[0].forward == pytest.approx(times[1].forward + 2 * times[2].forward)  # 4 layers over 2
    assert times[0].weights == times[1].weights
    heads = [ends(each, BOUNDLESS, demand.program, part)[1] for each in (shape, alone)]
    assert heads[0].forward > heads[1].forward


@pytest.mark.parametrize(
    ("logits", "workers", "runs"),
    [("stored", None, "their part"), ("workers", 0, "all"), ("workers", 1, "")],
)
def test_a_plan_counts_a_teacher_that_the_ranks_run_before_the_first_step(
    logits: str, workers: int | None, runs: str, place: Path
) -> None:
    """Under ZeRO 3 a rank holds its part for stored logits, and the whole teacher in place of teacher workers."""
    more = {} if workers is None else {"workers": {"min": workers, "max": 1}}
    spec = job(place, "gpt", logits={"source": logits}, **more)
    shape, demand = resolve(spec).shape, demand_of(spec)
    teacher = shape.teacher
    assert teacher is not None
    for layout, ways in ((Layout(micro_batch=2), 1), (Layout(dp=2, zero=3, micro_batch=2), 2)):
        found = rank_memory(demand, shape, layout, [0])[0]
        alone = rank_memory(demand, replace(shape, teacher=None), layout, [0])[0]
        assert found._replace(before=0.0) == alone
        samples = {"their part": 2, "all": 8, "": 0}[runs]  # of a micro-batch, or of the whole global batch
        # A layer of so small a model is wider than its vocabulary of 25 tokens.
        computed = 4 * samples * spec.data.sequence_length * 3 * teacher.feedforward
        held = 4 * teacher.parameters / (ways if runs == "their part" else 1)
        wanted = 4 * shape.parameters / ways + held + computed if runs else 0.0
        assert found.before == pytest.approx(wanted)
        assert found.peak == max(found.before, alone.peak)


def test_a_job_whose_ranks_have_no_room_for_the_teacher_is_refused_with_the_way_out(place: Path) -> None:
    """A student of some thousand parameters fits this machine, and the teacher of a billion does not."""
    spec = job(place, "gpt", logits={"source": "workers"})
    resolved = resolve(spec)
    assert resolved.shape.teacher is not None
    teacher = replace(resolved.shape.teacher, parameters=1e9)
    large = replace(resolved, shape=replace(resolved.shape, teacher=teacher))
    small = replace(BOUNDLESS, memory=2e9)
    with pytest.raises(InputError, match="these workers run the teacher before the first step") as refused:
        planned(demand_of(spec), large.shape, 2, small)
    assert "; set distill.workers.min to 1, so that only teacher workers do" in str(refused.value)
    with pytest.raises(InputError, match=r"per worker, which offers .* set distill.workers.min to 1"):
        check_fits(large, small)
    others = spec.with_parts(distill=spec.distill.model_copy(update={"workers": TeacherWorkers(min=1)}))
    assert planned(demand_of(others), large.shape, 2, small).fits
    check_fits(replace(large, spec=others), small)
    stored = spec.with_parts(distill=job(place, "gpt", logits={"source": "stored"}).distill)
    with pytest.raises(
        InputError, match=r"set distill\.logits\.source to workers and distill\.workers\.min to 1"
    ):
        planned(demand_of(stored), large.shape, 2, small)


def test_a_rehearsal_leaves_the_teacher_out_and_says_so(place: Path, tmp_path: Path) -> None:
    from orchestrator.verify.rehearsal.job import rehearsed

    found = rehearsed(resolve(job(place, "gpt")), Layout(dp=2, micro_batch=2), tmp_path)
    assert found.spec.distill is None
    assert "the teacher of distill was left out" in found.notes
