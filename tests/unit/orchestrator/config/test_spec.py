"""The job file: what is accepted, what is refused and in which words."""

from __future__ import annotations

import copy
import json
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from orchestrator.checkpoint.identity import differences
from orchestrator.config import chain, spec
from orchestrator.config.document import parse_yaml
from orchestrator.config.errors import InputError
from orchestrator.config.resources import Workers
from orchestrator.config.spec import JobSpec
from orchestrator.config.validation_messages import WrongKeys
from orchestrator.data.config import TrainBpe
from orchestrator.launch.first_job import first_job
from orchestrator.parallel.config import ParallelSpec
from orchestrator.tune.space import job_of

ROOT = Path(__file__).parents[4]
SMALLEST: dict[str, Any] = {
    "name": "small",
    "workload": {"model": "gpt-tiny"},
    "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
    "train": {"steps": 100, "global_batch": 8},
}
DESIGNED = """
name: gpt-shakespeare
seed: 17
workload: {model: gpt-tiny, objective: causal_lm}     # preset, preset with changes, or hf:<config or checkpoint>
data:
  sources: [{uri: corpus/*.txt, weight: 1.0}]
  tokenizer: {train_bpe: 4096}                         # or a tokenizer file or name
  sequence_length: 128
train:
  steps: 200
  global_batch: 32                                     # sequences per step; constant
  optimizer: {name: adamw, lr: 1e-3, warmup: 20, schedule: cosine}
  precision: fp32
parallel: auto                                         # or {engine, tp, pp, ep, cp, zero, schedule, micro_batch}
resources: {workers: {min: 1, max: 2}, per_worker: {cpu: 1, gpu: 0}, spares: 0}
checkpoint: {every: 20, keep: 3, export: hf}
tracking: {uri: "sqlite:///mlflow.db", experiment: demo}
limits: {cost_usd: 50, hours: 4}
"""
MISSING = object()


def changed(key: str, value: Any) -> dict[str, Any]:
    """The smallest job with one value put in, or taken out if MISSING."""
    document = copy.deepcopy(SMALLEST)
    place: Any = document
    *parents, last = key.split(".")
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return document


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(InputError) as found:
        spec.parse(document, "job.yaml")
    return str(found.value)


# -- what is refused


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("stepz", 1, ["job.yaml: stepz: unknown key", "known keys: name, seed, workload"]),
        ("Train", {}, ["job.yaml: Train: unknown key", "did you mean 'train'?"]),
        ("a\nb", 1, ["a b: unknown key"]),
        ("train.stepz", 1, ["train.stepz: unknown key", "did you mean 'steps'?"]),
        (
            "train.optimizer.learning_rate",
            1,
            ["unknown key; it is train.optimizer.lr here"],
        ),
        ("train.optimizer.nesterov", 0.9, ["train.optimizer.nesterov: unknown key", "lr, betas"]),
        ("train.optimizer.groups", [{"match": ["a"]}], ["the group changes nothing"]),
        ("train.optimizer.momentum", 0.9, ["momentum is for muon, but this is adamw"]),
        ("train.gradient_accumulation", 2, ["unknown key", "it follows from train.global_batch"]),
        ("train.optimizer.name", "adam", ["should be 'adamw'", "adamw with weight_decay 0 is Adam"]),
        ("train.precision", "bfloat16", ["it is bf16 here"]),
        (
            "train.optimizer.warmup",
            "x%",
            ["train.optimizer.warmup: is neither a number of steps nor a share", "5%"],
        ),
        ("seed", True, ["seed: should not be true or false"]),
        ("train.optimizer.lr", True, ["train.optimizer.lr: should not be true or false"]),
        ("name", 7, ["name: should be text, in quotes"]),
        (
            "evaluate",
            {"every:3": None},
            ["evaluate.every:3: unknown key; put a blank after the colon, as in {every: 3}"],
        ),
        ("notify", True, ["notify: must be a mapping of keys to values (got True); its keys: webhook, on"]),
        ("limits.hours", "half", ["limits.hours: should be a number (got 'half')"]),
        (
            "train.optimizer.betas",
            0.9,
            ["train.optimizer.betas: should be a list (got 0.9); put it in brackets"],
        ),
        ("data.sources.0.wieght", 2, ["data.sources.0.wieght: unknown key", "did you mean 'weight'?"]),
        ("data.tokenizer", {"train_bp": 512}, ["data.tokenizer.train_bp", "did you mean 'train_bpe'?"]),
        (
            "evaluate",
            {"metrics": ["accuracy", "precison"]},
            [
                "evaluate.metrics.1: should be 'loss', ",
                "(got 'precison'); did you mean 'precision'?",
            ],
        ),
        ("data.packing", True, ["data.packing: should be 'cut' or 'best_fit' (got True)"]),
        ("train.optimizer.name", "sgd", ["(got 'sgd'); choose one of these, or your own module:name"]),
        ("train.precision", "tf32", ["train.precision: should be 'fp32'", "(got 'tf32')"]),
        ("parallel", {"tpp": 2}, ["parallel.tpp: unknown key", "did you mean 'tp'?"]),
        ("resources.worker", 2, ["resources.worker: unknown key", "did you mean 'workers'?"]),
        ("name", MISSING, ["job.yaml: name: is missing", "add it", "orchestrator schema"]),
        ("train", MISSING, ["job.yaml: train: is missing"]),
        ("train.steps", MISSING, ["train.steps: is missing"]),
        ("resources.workers", {"min": 1}, ["resources.workers.max: is missing"]),
        ("name", "a b", ["name: is not a name (got 'a b'); use 1 to 63 letters"]),
        ("name", "-a", ["name: is not a name (got '-a')"]),
        ("seed", -1, ["seed: should be greater than or equal to 0 (got -1)"]),
        ("workload", "gpt-tiny", ["workload: must be a mapping", "its keys: model, changes, objective"]),
        ("train", None, ["train: must be a mapping", "its keys: steps, global_batch"]),
        ("data.max_rejected", "1%", ["data: max_rejected needs a policy", "set on_error to skip or repair"]),
        ("data.chat_date", 20240726, ["data.chat_date: 20240726 is not a day; write it as in 2026-11-28"]),
        ("data.chat_date", "26 Jul 2024", ["data.chat_date: should be a valid date"]),
        ("data.max_rejected", "1", ["data.max_rejected: '1' is neither a number of documents"]),
        (
            "data.sources.0.field",
            "{a!r}",
            ["data.sources.0.field: '{a!r}' has a format after the column in {a}"],
        ),
        ("data.sources.0.uri", [], ["data.sources.0.uri"]),
        ("data.sources", ["a.txt"], ["data.sources.0: must be a mapping", "its keys: uri, weight, field"]),
        (
            "data.sources",
            "a.txt",
            ["should be a list (got 'a.txt'); begin each entry with a dash; the keys of an entry: uri, "],
        ),
        ("data.sources", [], ["data.sources: list should have at least 1 item"]),
        ("data.sources.0.weight", 0, ["data.sources.0.weight: should be greater than 0 (got 0)"]),
        ("data.tokenizer", {"train_bpe": 5}, ["data.tokenizer.train_bpe", "greater than or equal to 300"]),
        ("data.sequence_length", 4, ["data.sequence_length: should be greater than or equal to 8"]),
        ("train.steps", 1.5, ["train.steps: should be a whole number", "(got 1.5)"]),
        ("train.steps", "many", ["train.steps: should be a whole number", "(got 'many')"]),
        ("train.optimizer.warmup", 100, ["train: optimizer.warmup 100 is not below steps 100", "shorten"]),
        ("train.optimizer.name", "sgd", ["train.optimizer.name: should be 'adamw', ", "(got 'sgd')"]),
        ("train.optimizer.lr", float("inf"), ["train.optimizer.lr: should be a finite number"]),
        ("train.optimizer.betas", [0.9, 1.0], ["train.optimizer.betas.1: should be less than 1"]),
        ("train.precision", "fp4", ["train.precision: should be 'fp32', ", "(got 'fp4')"]),
        (
            "train",
            {"steps": 9, "global_batch": 12, "determinism": "bitwise"},
            ["train: virtual_shards 8 must be a power of two that divides global_batch 12", "change one"],
        ),
        (
            "train",
            {"steps": 9, "global_batch": 12, "determinism": "bitwise", "virtual_shards": 6},
            ["train: virtual_shards 6 must be a power of two"],
        ),
        (
            "parallel",
            "aut",
            ["should be 'auto' or a mapping of keys to values (got 'aut'); did you mean 'auto'?"],
        ),
        ("parallel", "fsdp", ["or a mapping of keys to values (got 'fsdp'); its keys: engine, tp"]),
        ("train.optimizer.name", "AdamW", ["(got 'AdamW'); did you mean 'adamw'?"]),
        ("train.optimizer.schedule", "cosin", ["(got 'cosin'); did you mean 'cosine'?"]),
        ("train.freeze", "a", ["train.freeze: should be a list (got 'a'); put it in brackets"]),
        ("parallel", {"tp": 0}, ["parallel.tp: should be greater than or equal to 1"]),
        ("parallel", {"zero": 4}, ["parallel.zero: should be 0, 1, 2 or 3 (got 4)"]),
        ("resources.workers", {"min": 3, "max": 2}, ["resources.workers: min 3 is above max 2; swap them"]),
        ("resources.workers", 0, ["resources.workers.min: should be greater than or equal to 1"]),
        ("resources.per_worker.gpu", 2, ["resources.per_worker.gpu", "0 or 1 GPU", "raise workers"]),
        ("resources.per_worker.labels", {"zone": "in(a,,b)"}, ["zone=in(a,,b) selects nothing", "in(a,b)"]),
        ("resources.per_worker.cpu", 0, ["resources.per_worker.cpu: should be greater than 0"]),
        (
            "resources.per_worker.cpu",
            1e30,
            ["resources.per_worker.cpu: should be less than or equal to 10000"],
        ),
        ("checkpoint.every", 0, ["checkpoint.every: should be greater than or equal to 1"]),
        (
            "checkpoint",
            {"every": 10, "keep_every": 25},
            ["checkpoint: keep_every 25 is not a multiple of every 10", "change one of them"],
        ),
        ("checkpoint.average", "ema", ["checkpoint.average: must be a mapping", "its keys: ema, last"]),
        ("checkpoint.average", {}, ["checkpoint.average: average has one of the keys ema and last"]),
        ("checkpoint.average", {"ema": 0.9, "last": 2}, ["average has one of the keys", "{ema: 0.999}"]),
        ("checkpoint.average", {"ema": 1.0}, ["checkpoint.average.ema: should be less than 1"]),
        ("checkpoint.average", {"last": 1}, ["average.last: should be greater than or equal to 2"]),
        ("limits.unsaved", 0, ["limits.unsaved: should be greater than 0"]),
        (
            "checkpoint.export",
            "tar",
            ["checkpoint.export: should be 'hf', 'adapter', 'safetensors', 'dcp', 'gguf' or 'onnx'"],
        ),
        ("limits.cost_usd", 0, ["limits.cost_usd: should be greater than 0"]),
        ("limits.wait", "10 min", ["limits.wait: should be a number", "'10 min'"]),
    ],
)
def test_a_wrong_job_is_one_line(key: str, value: Any, wanted: list[str]) -> None:
    line = refusal(changed(key, value))
    assert [fragment for fragment in wanted if fragment not in line] == []
    assert "\n" not in line
    assert line.startswith("job.yaml: ")


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_mup_is_refused_where_it_is_not_defined(name: str) -> None:
    document = changed("workload.mup", {"hidden": 64})
    assert spec.parse(document).workload.mup == {"hidden": 64}
    document["train"]["optimizer"] = {"name": name}
    assert f"the optimizer is {name}; set train.optimizer.name to one of them" in refusal(document)


def test_the_line_says_how_many_more_there_are() -> None:
    document = changed("train.stepz", 1) | {"colour": "red"}
    assert "(and 1 more)" in refusal(document)
    assert "(and 3 more)" in refusal({})


def test_all_that_is_wrong_is_told() -> None:
    with pytest.raises(InputError) as told:
        spec.parse({"seed": "x", "colour": "red"}, "job.yaml")
    first, *others = (told.value, *told.value.others)
    assert "job.yaml: seed: should be a whole number" in str(first)
    assert [str(each).split("; ")[0] for each in others] == [
        "job.yaml: colour: unknown key",
        *(f"job.yaml: {key}: is missing" for key in ("name", "workload", "data", "train")),
    ]


def test_a_wrong_value_in_one_member_of_a_union_is_one_error() -> None:
    with pytest.raises(InputError) as told:
        spec.parse(changed("data.tokenizer", {"train_bpe": 10**11}))
    assert [each.where for each in told.value.each()] == ["job: data.tokenizer.train_bpe"]


def test_a_share_of_wrong_steps_is_no_second_error() -> None:
    for steps in ("many", -5, 10**30, True):
        document = changed("train.steps", steps)
        document["train"]["optimizer"] = {"warmup": "10%"}
        with pytest.raises(InputError) as told:
            spec.parse(document)
        assert [each.where for each in told.value.each()] == ["job: train.steps"]


def test_what_is_left_of_a_wrong_job_can_be_looked_at() -> None:
    document = changed("train.optimizer.name", "adam") | {"colour": "red", "seed": "x"}
    with pytest.raises(WrongKeys) as told:
        spec.parse(document)
    rest = told.value.rest
    assert (rest.train.optimizer.name, rest.seed, rest.train.steps) == ("adamw", 0, 100)
    assert pickle.loads(pickle.dumps(told.value)).rest == rest
    with pytest.raises(InputError) as hopeless:
        spec.parse(changed("train.steps", "many"))
    assert not isinstance(hopeless.value, WrongKeys)


def test_on_is_a_key_and_not_true() -> None:
    assert parse_yaml("notify: {on: [failed], off: on}", "job.yaml") == {
        "notify": {"on": ["failed"], "off": True}
    }


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"job.yaml:2: is not YAML \(the key 'seed' appears twice; remove one\)"
    ):
        parse_yaml("seed: 1\nseed: 2\n", "job.yaml")
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, b: 2}\n", "job.yaml")["c"] == {"b": 2}
    nested = parse_yaml("d: {<<: &y {<<: &z {b: 3}, b: 4}, e: 1}\nf: *y\ng: *z\n", "job.yaml")
    assert nested == {"d": {"b": 4, "e": 1}, "f": {"b": 4}, "g": {"b": 3}}
    with pytest.raises(InputError, match="is not YAML"):
        parse_yaml("? [a, b]\n: 1\n", "job.yaml")


@pytest.mark.parametrize("steps", [200, 200.0, "200"], ids=repr)
def test_a_warm_up_may_be_a_share_of_the_steps(steps: Any) -> None:
    shares = {"warmup": "2.5%", "decay": "20%", "schedule": "wsd"}
    parsed = spec.parse(changed("train", {"steps": steps, "global_batch": 8, "optimizer": shares}))
    optimizer = parsed.train.optimizer
    assert (optimizer.warmup, optimizer.decay) == ("2.5%", "20%")
    assert (parsed.train.warmup_steps, parsed.train.decay_steps, parsed.train.decay_from) == (5, 40, 160)
    assert parsed == spec.parse(yaml.safe_load(spec.dump(parsed)))
    told = parsed.identity()["train"]["optimizer"]
    assert (told["warmup"], told["decay"]) == (5, 40)


def test_a_share_is_one_of_the_steps_that_the_job_has_at_last() -> None:
    """A search or `--set` changes the steps of a job that was read before."""
    optimizer = {"warmup": "10%", "decay": "20%", "schedule": "wsd"}
    said = spec.parse(changed("train", {"steps": 100, "global_batch": 8, "optimizer": optimizer}))
    longer = job_of(said, {"train.steps": 1000})
    assert (longer.train.warmup_steps, longer.train.decay_from) == (100, 800)
    old = spec.parse(
        {**SMALLEST, "train": {**said.identity()["train"]}}
    )  # numbers, as earlier versions wrote them
    assert differences(said.identity(), old.identity()) == []
    assert job_of(old, {"train.steps": 1000}).train.warmup_steps == 10


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ({"warmup": "100%"}, "optimizer.warmup 100% is not below steps 100"),
        ({"schedule": "wsd", "decay": "0.5%"}, "optimizer.decay 0.5% of 100 steps is less than one"),
        ({"schedule": "wsd", "decay": "0%"}, "schedule wsd has no decay"),
        ({"decay": "5%"}, "decay 5% is for schedule wsd"),
        ({"warmup": -1}, "train.optimizer.warmup: should be greater than or equal to 0"),
        ({"warmup": 1.5}, "train.optimizer.warmup: should be a whole number"),
        ({"warmup": True}, "train.optimizer.warmup: should not be true or false"),
    ],
    ids=str,
)
def test_shares_that_cannot_be(optimizer: dict[str, Any], wanted: str) -> None:
    assert wanted in refusal(changed("train", {"steps": 100, "global_batch": 8, "optimizer": optimizer}))


def test_a_preset_has_its_published_dropout_and_no_other_one() -> None:
    published = spec.parse(changed("workload", {"model": "gpt2"}))
    assert published.workload.dropouts == (0.1, 0.1)
    assert yaml.safe_load(spec.dump(published))["workload"]["dropout"] is None  # nothing was said
    assert published.identity()["workload"]["attention_dropout"] == 0.1
    assert job_of(published, {"workload.model": "gpt-tiny"}).workload.dropouts == (0.0, 0.0)
    assert spec.parse(changed("workload", {"model": "gpt2", "dropout": 0.3})).workload.dropouts == (0.3, 0.0)


REWRITTEN = {
    "ObjectReference": "one value stands for a mapping of it",
    "CleanStep": "one value stands for a mapping of it",
    "AdapterSpec": "one value stands for a list of it",
    "ResourceSpec": "one value stands for a mapping of it",
    "RolloutSpec": "one value stands for a mapping of it",
    "DistillSpec": "one number stands for both bounds of teacher workers",
    "TrainSpec": "one value stands for a mapping of it",
    "JobSpec": "own samples have one objective alone",
    "DataSpec": "what text needs and own samples do without; streaming has one shuffle alone",
}
"""The parts of a job whose validators put something in place of what the file says, and why nothing is lost: it does
not depend on another key that may be changed later."""


def test_no_other_part_of_a_job_rewrites_what_was_said() -> None:
    """A number that is computed while a file is read stays as it is when the keys that it follows from change."""
    seen: dict[str, type[BaseModel]] = {}

    def walk(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if kind.__name__ not in seen:
                seen[kind.__name__] = kind
                for field in kind.model_fields.values():
                    walk(field.annotation)
            return
        for part in typing.get_args(kind):
            walk(part)

    walk(spec.JobSpec)
    found = set()
    for name, kind in seen.items():
        decorators = kind.__pydantic_decorators__
        before = [
            each.cls_var_name for each in decorators.model_validators.values() if each.info.mode != "after"
        ]
        before += [
            each.cls_var_name for each in decorators.field_validators.values() if each.info.mode != "after"
        ]
        refusing = {"a_number_is_no_truth_value", "a_day_is_no_number", "known_by_another_name"}
        if set(before) - refusing:
            found.add(name)
    assert found == REWRITTEN.keys()


def test_keys_that_are_no_strings() -> None:
    assert "keys should be strings" in refusal({**SMALLEST, 1: 2})  # type: ignore[dict-item]


# -- what is accepted


def test_the_design_s_example() -> None:
    job = spec.parse(yaml.safe_load(DESIGNED))
    assert job.train.optimizer.lr == 1e-3  # YAML 1.1 reads 1e-3 as a string
    assert job.data.tokenizer == TrainBpe(train_bpe=4096)
    assert job.parallel == "auto"
    assert (job.limits.cost_usd, job.limits.hours) == (50, 4)


def test_defaults() -> None:
    job = spec.parse(SMALLEST)
    assert (job.seed, job.parallel, job.tracking) == (0, "auto", None)
    assert job.resources.workers == Workers(min=1, max=1)
    assert job.checkpoint.export == "hf"
    assert job.train.optimizer.betas == (0.9, 0.95)


def test_a_published_preset_has_its_dropout_unless_the_job_says() -> None:
    def rates(**fields: Any) -> tuple[float, float]:
        return spec.parse({**SMALLEST, "workload": fields}).workload.dropouts

    assert rates(model="bert-base", objective="masked_lm") == (0.1, 0.1)
    assert rates(model="gpt2") == (0.1, 0.1)
    assert rates(model="gpt2", dropout=0.0) == (0.0, 0.0)  # as runs of earlier versions have it on record
    assert rates(model="gpt2", dropout=0.2) == (0.2, 0.0)
    assert rates(model="gpt-tiny") == rates(model="llama-3-8b") == (0.0, 0.0)
    assert "workload.model" in refusal({**SMALLEST, "workload": {"objective": "causal_lm"}})
    assert "workload.model" in refusal({**SMALLEST, "workload": {"model": ["gpt2"]}})


def test_one_number_of_workers_is_both() -> None:
    assert spec.parse(changed("resources.workers", 3)).resources.workers == Workers(min=3, max=3)


def test_a_tokenizer_may_be_a_path() -> None:
    assert spec.parse(changed("data.tokenizer", "tokenizer.json")).data.tokenizer == "tokenizer.json"


def test_a_layout_by_hand() -> None:
    assert spec.parse(changed("parallel", {"tp": 2, "zero": 1})).parallel == ParallelSpec(tp=2, zero=1)


def test_a_job_does_not_change() -> None:
    job = spec.parse(SMALLEST)
    with pytest.raises(ValidationError, match="frozen"):
        job.train.steps = 5  # type: ignore[misc]


# -- files


def test_dump_and_load_are_inverse(tmp_path: Path) -> None:
    job = spec.parse(changed("parallel", {"tp": 2, "micro_batch": 4}))
    (tmp_path / "job.yaml").write_text(spec.dump(job))
    assert spec.load(tmp_path / "job.yaml") == job


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "there is no such job file; write one with `orchestrator init`"),
        (b"name: [", "job.yaml:1: is not YAML"),
        (b"name: a\n\tseed: 1\n", "job.yaml:2: is not YAML"),
        (b"train:\n\tsteps: 1\n", "indent with spaces; YAML does not allow tabs"),
        (b"- a\n- b\n", "must be a mapping of keys to values"),
        (b"", "is empty; write one with `orchestrator init`"),
        (b"just words", "must be a mapping of keys to values"),
        (b"name: \xff\xfe", "is not text in UTF-8 (its byte 7 is 0xff)"),
        ("name: a".encode("utf-16"), "is not text in UTF-8"),
        (b"name: a\0", "it has the character 0x00"),
        (b"name: " + b"[" * 1000, "is nested too deeply"),
        (b"seed: " + b"9" * 5000, "a number has thousands of digits"),
        (b"name: a\n---\nname: b\n", "is not YAML"),
        (b"name: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"name: 2024-13-45", "is not YAML"),
    ],
)
def test_a_file_that_is_no_job_is_one_line(tmp_path: Path, content: bytes | None, wanted: str) -> None:
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as found:
        spec.load(path)
    assert str(found.value).startswith(str(tmp_path))
    assert wanted in str(found.value)
    assert "\n" not in str(found.value)


def test_a_folder_is_no_job(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        spec.load(tmp_path)


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    return path


def test_overrides_reach_any_key_and_keep_types(smallest: Path) -> None:
    job = spec.load(
        smallest,
        [
            "train.steps=50",
            "train.optimizer.lr=1e-4",
            "parallel.tp=2",
            "resources.workers=2",
            "workload.changes.hidden=32",
            "data.tokenizer=tokenizer.json",
            "data.sources=[{uri: b.txt, weight: 2}]",
            "tracking=null",
        ],
    )
    assert (job.train.steps, job.train.optimizer.lr, job.parallel) == (50, 1e-4, ParallelSpec(tp=2))
    assert job.resources.workers == Workers(min=2, max=2)
    assert job.workload.changes == {"hidden": 32}
    assert job.data.tokenizer == "tokenizer.json"
    assert [(s.uri, s.weight) for s in job.data.sources] == [("b.txt", 2.0)]
    assert job.tracking is None


def test_a_source_is_named_by_its_place(smallest: Path) -> None:
    two = "data.sources=[{uri: a.txt}, {uri: b.txt}]"
    job = spec.load(smallest, [two, "data.sources.1.weight=2", "data.sources.0.uri=c.txt"])
    assert [(s.uri, s.weight) for s in job.data.sources] == [("c.txt", 1.0), ("b.txt", 2.0)]


def test_the_last_override_wins_and_words_become_mappings(smallest: Path) -> None:
    job = spec.load(smallest, ["parallel=auto", "parallel.tp=2", "parallel.tp=4"])
    assert job.parallel == ParallelSpec(tp=4)


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        (
            "train.steps",
            "--set train.steps: is not of the form a.b=c; write for example --set train.steps=50",
        ),
        ("=5", "--set =5: is not of the form a.b=c"),
        ("train.steps=", "train.steps: should be a whole number"),
        ("train.stepz=5", "train.stepz: unknown key; did you mean 'steps'?"),
        ("train..steps=5", "train.: unknown key"),
        ("train.steps.much=5", "'steps' is not a mapping; override all of it"),
        ("data.sources.1.weight=2", "there is no '1'; choose from 0"),
        ("data.sources.0=b.txt", "'0' is one of several; override its keys, one by one"),
        ("train.steps={", "the value is not YAML"),
        ("name=2024-13-45", "the value is not YAML"),
    ],
)
def test_a_wrong_override_is_one_line(tmp_path: Path, override: str, wanted: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(changed("train.steps", 100)))
    with pytest.raises(InputError) as found:
        spec.load(path, [override])
    assert wanted in str(found.value)
    assert "\n" not in str(found.value)


# -- identity


def test_newer_keys_count_only_where_they_are_set() -> None:
    """So that a run of an earlier version is still the same run."""
    found = spec.parse(SMALLEST).identity()
    assert not {"momentum", "layer_decay"} & found["train"]["optimizer"].keys()
    assert not {"freeze", "thaw", "sequence_warmup", "reference"} & found["train"].keys()
    assert "train.reference is for dpo" in refusal(changed("train.reference", "held"))
    assert not {"adapter", "attention_dropout"} & found["workload"].keys()
    assert found["data"] == {
        "sources": [{"uri": "a.txt", "weight": 1.0, "field": "text"}],
        "tokenizer": {"train_bpe": 512},
        "sequence_length": 32,
        "labels": [],
        "chat_template": None,
        "validation": None,
    }
    assert spec.parse(changed("data.on_error", "skip")).identity() != found
    assert spec.parse(changed("data.sources.0.format", "jsonl")).identity() != found
    assert spec.parse(changed("data.chat_date", "2024-07-26")).identity() != found
    assert spec.parse(changed("train.freeze", ["tokens.*"])).identity() != found
    assert spec.parse(changed("train.optimizer.layer_decay", 0.9)).identity() != found
    assert not {"groups", "label_smoothing"} & {*found["train"], *found["train"]["optimizer"]}
    assert spec.parse(changed("train.label_smoothing", 0.1)).identity() != found
    groups = [{"match": ["*.weight"], "lr_scale": 0.5}]
    assert spec.parse(changed("train.optimizer.groups", groups)).identity() != found
    muon = spec.parse(changed("train.optimizer.name", "muon")).identity()
    assert "momentum" not in muon["train"]["optimizer"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 5), ("workload.changes", {"hidden": 32}), ("data.sequence_length", 64), ("train.steps", 101),
        ("train.global_batch", 16), ("train.optimizer.lr", 1.0), ("train.precision", "bf16"),
        ("data.sources.0.weight", 2.0), ("data.tokenizer", "tokenizer.json"), ("workload.mup", {"hidden": 64}),
        ("checkpoint.average", {"ema": 0.9}), ("data.packing", "best_fit"),
        ("train.sequence_warmup", {"length": 8, "steps": 50}), ("data.mixture", {"alpha": 0.5}),
        ("data.sources.0.share", 1.0), ("workload.attention_dropout", 0.1),
    ],
)  # fmt: skip
def test_what_decides_the_weights_is_the_identity(key: str, value: Any) -> None:
    assert spec.parse(changed(key, value)).identity() != spec.parse(SMALLEST).identity()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "other"), ("parallel", {"tp": 2}), ("resources.workers", 4), ("checkpoint.every", 7),
        ("tracking", {"uri": "http://host"}), ("limits.hours", 1), ("data.cache", "/cache"),
        ("checkpoint.average", {"last": 3}),
    ],
)  # fmt: skip
def test_nothing_else_is(key: str, value: Any) -> None:
    assert spec.parse(changed(key, value)).identity() == spec.parse(SMALLEST).identity()


# -- schema


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    document = JobSpec.model_json_schema()
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


def test_the_schema_accepts_the_template(schema: Draft202012Validator) -> None:
    document = yaml.safe_load(first_job("mine", ["corpus/*.txt"]).text)
    schema.validate(document)
    assert spec.parse(document).name == "mine"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema_accepts_every_example(path: Path) -> None:
    Draft202012Validator(json.loads(chain.schema())).validate(yaml.safe_load(path.read_text()))
    assert chain.load_job(path)


def test_the_schema_knows_that_one_number_of_workers_is_both(schema: Draft202012Validator) -> None:
    schema.validate(changed("resources.workers", 2))
    assert not schema.is_valid(changed("resources.workers", "two"))


def test_the_schema_accepts_a_dumped_job(schema: Draft202012Validator) -> None:
    schema.validate(yaml.safe_load(spec.dump(spec.parse(SMALLEST))))


@pytest.mark.parametrize(
    ("key", "value"), [("stepz", 1), ("train.steps", 0), ("train.precision", "fp4"), ("name", MISSING)]
)
def test_the_schema_refuses_what_the_program_refuses(
    schema: Draft202012Validator, key: str, value: Any
) -> None:
    assert not schema.is_valid(changed(key, value))


def test_every_key_of_the_top_is_in_the_schema() -> None:
    assert set(JobSpec.model_json_schema()["properties"]) == set(JobSpec.model_fields)


@pytest.mark.parametrize("key", ["data.validation", "evaluate.sets.wiki"])
def test_held_out_text_has_no_weight(key: str) -> None:
    with pytest.raises(
        InputError, match=r"sources.1.weight is 2, but held-out text is read once; leave it out"
    ):
        spec.parse(changed(f"{key}.sources", [{"uri": "a.txt"}, {"uri": "b.txt", "weight": 2}]))


def test_streaming_goes_by_sections_and_only_that_is_of_the_identity() -> None:
    plain = JobSpec(**SMALLEST).identity()
    assert not {"streaming", "shuffle"} & plain["data"].keys()
    streamed = JobSpec(**changed("data.streaming", True))
    assert (streamed.data.shuffle, streamed.identity()["data"]["shuffle"]) == ("sections", "sections")
    assert "streaming" not in streamed.identity()["data"]
    assert streamed.identity() == JobSpec(**changed("data.shuffle", "sections")).identity()
    assert JobSpec(**streamed.model_dump(mode="json")) == streamed


def test_streaming_an_epoch_that_is_shuffled_whole_is_refused() -> None:
    document = changed("data.streaming", True)
    document["data"]["shuffle"] = "epoch"
    with pytest.raises(ValidationError, match="streaming needs shuffle: sections"):
        JobSpec(**document)


def test_tokens_are_added_to_a_tokenizer_that_is_given() -> None:
    assert "add_tokens is for a tokenizer that is given" in refusal(changed("data.add_tokens", ["<a>"]))
    given = changed("data.tokenizer", "tokenizer.json")
    given["data"]["add_tokens"] = ["<a>", "<a>"]
    assert "names a token twice" in refusal(given)
    given["data"]["add_tokens"] = ["<a>"]
    assert spec.parse(given).identity() != spec.parse(changed("data.tokenizer", "tokenizer.json")).identity()
