"""A job file with stages: what it may say, what each stage's job becomes, and what is refused in one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import job
from jsonschema import Draft202012Validator

from orchestrator.config.chain import ChainSpec, chain_of_seeds, load_job, parse_chain, schema
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse

PRETRAIN = {"workload": {"init_from": "stage:pretrain"}, "data": {"tokenizer": "stage:pretrain"}}


def chain(*stages: dict[str, Any], **common: Any) -> dict[str, Any]:
    return job("a.txt") | {"name": "c", "stages": list(stages)} | common


def usual() -> dict[str, Any]:
    """Stages of which two begin with the first, the later ones first in the file."""
    tuned = copy.deepcopy(PRETRAIN)
    return chain({"name": "one", **tuned}, {"name": "two", **tuned, "seed": 9}, {"name": "pretrain"})


def test_keys_beside_the_stages_are_defaults_that_a_stage_merges_into() -> None:
    found = parse_chain(usual())
    assert [stage.name for stage in found.stages] == ["pretrain", "one", "two"]  # in an order that can run
    assert found["two"].job.seed == 9
    assert found["one"].job.seed == 3
    assert found["one"].job.train == found["pretrain"].job.train
    assert found["one"].job.workload.changes == found["pretrain"].job.workload.changes
    assert found["one"].job.data.sources == found["pretrain"].job.data.sources
    assert [stage.job.name for stage in found.stages] == ["c-pretrain", "c-one", "c-two"]
    assert [stage.needs for stage in found.stages] == [(), ("pretrain",), ("pretrain",)]
    assert found.after("pretrain") == ["one", "two"]


def test_a_value_that_is_no_mapping_takes_the_place_of_the_default() -> None:
    document = usual()
    document["stages"][2] |= {"data": {"sources": [{"uri": "b.txt"}], "validation": {"share": 0.1}}}
    document["stages"][2]["train"] = {"optimizer": {"lr": 1.0}}
    found = parse_chain(document)["pretrain"].job
    assert [source.uri for source in found.data.sources] == ["b.txt"]
    assert (found.train.optimizer.lr, found.train.optimizer.warmup) == (1.0, 2)


def test_the_document_of_a_chain_is_that_chain() -> None:
    found = parse_chain(usual())
    assert parse_chain(found.document()) == found


def test_paths_are_made_absolute_and_names_of_stages_are_not() -> None:
    found = parse_chain(usual()).with_paths(Path("/here"))
    assert found["one"].job.data.sources[0].uri == "/here/a.txt"
    assert found["one"].job.data.tokenizer == "stage:pretrain"
    assert found["one"].needs == ("pretrain",)


def test_a_stage_is_named_in_an_override(tmp_path: Path) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(yaml.safe_dump(usual()))
    found = load_job(path, ["stages.two.train.steps=7", "train.steps=5"])
    assert isinstance(found, ChainSpec)
    assert [stage.job.train.steps for stage in found.stages] == [5, 5, 7]
    for text, wanted in (
        ("stages.three.train.steps=7", "there is no 'three'; choose from one, two, pretrain"),
        ("stages.two=7", "'two' is one of several"),
    ):
        with pytest.raises(InputError, match=wanted):
            load_job(path, [text])


def test_a_job_without_stages_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job("a.txt")))
    assert load_job(path) == parse(job("a.txt"))
    with pytest.raises(InputError, match="is a chain of stages, but one job is wanted"):
        parse(usual())


BASE = {"name": "base"}
EXPORTED = {"export": "hf", "export_to": "/x"}
LORA = {"kind": "lora", "rank": 4}


def on(reference: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "next",
        "workload": {"init_from": reference},
        "data": {"tokenizer": "stage:base"},
        **more,
    }


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ([], "job: stages: must be a list of stages"),
        (["a"], "job: stages.0: must be a mapping"),
        ([{"seed": 1}], "job: stages.0.name: is missing"),
        ([{"name": "1a"}], "job: stages.0.name: '1a' cannot be the name of a stage"),
        ([{"name": "checkpoints"}], "'checkpoints' cannot be the name of a stage"),
        ([{"name": "a" * 80}], "cannot be the name of a stage"),
        ([BASE, BASE], "job: stages.1.name: there are two stages of the name base"),
        ([BASE, on("stage:bass")], "stages.next.workload.init_from: there is no stage 'bass'; did you mean base?"),
        ([BASE, on("stage:next")], "stages.next.workload.init_from: next names itself"),
        ([BASE | {"workload": {"init_from": "stage:next"}}, on("stage:base")],
         "job: stages: base needs next needs base: none of them can begin"),
        ([BASE, on("stage:base@best")], "base keeps no best commit by a metric; set checkpoint.keep_best of base"),
        ([BASE, on("stage:base@7")], "base will have no commit at 7 when it is done"),
        ([BASE | {"checkpoint": {"keep": 1}}, on("stage:base@8")], "base will have no commit at 8"),
        ([BASE, on("stage:base@soon")], "base will have no commit at soon"),
        ([BASE, on("stage:base", data={"tokenizer": "stage:base@4"})], "a stage has one tokenizer; leave out @4"),
        ([BASE, on("stage:base", data={"sources": [{"uri": "b.txt"}]})],
         "stages.next.data.tokenizer: trains another tokenizer than that of base, whose weights it begins with; "
         "set it to stage:base"),
        ([BASE | {"train": {"stepps": 1}}], "job: stages.base: train.stepps: unknown key; did you mean 'steps'?"),
        ([BASE | {"tune": {"space": {"train.optimizer.lr": {"choice": [1, 2]}}, "trials": 2}}],
         "stages.base.tune: a stage cannot be a search"),
        ([BASE | {"tracking": {"uri": "file:a"}}, {"name": "b", "tracking": {"uri": "file:b"}}],
         "job: tracking: the stages of a chain share one MLflow run"),
        ([BASE, on("stage:base", workload={"init_from": "stage:base", "adapter": LORA}),
          {"name": "more", "workload": {"init_from": "stage:next"}, "data": {"tokenizer": "stage:base"}}],
         "next trains an adapter, but its commits lack its base; set checkpoint.export of next to hf"),
        ([BASE, on("stage:base", workload={"init_from": "stage:base", "adapter": LORA}, checkpoint={"export": "hf"}),
          {"name": "more", "workload": {"init_from": "stage:next@8"}, "data": {"tokenizer": "stage:base"}}],
         "next trains an adapter and exports only @last; use @last"),
        ([BASE | {"checkpoint": EXPORTED}, {"name": "b", "checkpoint": EXPORTED}],
         "base and b are exported to the same folder"),
    ],
)  # fmt: skip
def test_what_is_no_chain_is_refused_in_one_line(stages: list[Any], wanted: str) -> None:
    with pytest.raises(InputError) as found:
        parse_chain(chain(*stages))
    assert wanted in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("tag", "checkpoint"), [("8", {}), ("12", {"keep": 1}), ("4", {"keep": 1, "keep_every": 4}), ("last", {})]
)
def test_a_commit_that_will_be_kept_may_be_named(tag: str, checkpoint: dict[str, Any]) -> None:
    parse_chain(chain(BASE | {"checkpoint": checkpoint}, on(f"stage:base@{tag}")))


def test_the_tokenizer_of_the_same_text_is_the_same() -> None:
    parse_chain(chain(BASE, {"name": "next", "workload": {"init_from": "stage:base"}}))


def test_a_chain_of_seeds_has_the_job_under_each_seed() -> None:
    one = parse(job("a.txt"))
    found = chain_of_seeds(one.document(), 3)
    assert found.name == "small-seeds"
    assert [stage.name for stage in found.stages] == ["seed-3", "seed-4", "seed-5"]
    for seed, stage in zip((3, 4, 5), found.stages, strict=True):
        assert stage.job == one.with_parts(name=f"small-seeds-seed-{seed}", seed=seed)
    assert parse_chain(found.document()) == found


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"name": "n" * 60}, "longer than 63 characters"),
        ({"checkpoint": {"export": "hf", "export_to": "/there"}}, "--set checkpoint.export_to=null"),
        ({"checkpoint": {"export": "hf", "push": "me/model"}}, "--set checkpoint.push=null"),
        (
            {"checkpoint": {"export": "hf"}, "tracking": {"register_as": "m"}},
            "--set tracking.register_as=null",
        ),
        (job("a.txt", continue_from="runs/a"), "replace train.continue_from by workload.init_from"),
    ],
)
def test_seeds_that_do_not_fit_are_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        chain_of_seeds(parse(job("a.txt") | changes).document(), 2)


def test_the_schema_takes_chains_and_jobs() -> None:
    validator = Draft202012Validator(json.loads(schema()))
    for document in (usual(), job("a.txt")):
        validator.validate(document)
    validator.validate(chain(LARGE, WORDS, SMALLER))
    assert not validator.is_valid(chain(LARGE, WORDS | {"vocabulary": {"off": "stage:base"}}))
    for wrong in ({"stages": []}, {"stages": [{"seed": 1}]}, {"stages": [{"name": "a", "sed": 1}]}):
        assert not validator.is_valid(usual() | wrong)


WORDS = {"name": "words", "vocabulary": {"of": "stage:base", "at_least": 2}}
SMALLER = {
    "name": "smaller",
    "workload": {"model": "stage:words", "shrink": {"layers": [1]}},
    "data": {"tokenizer": "stage:words"},
    "distill": {"teacher": "stage:words"},
}
LARGE = BASE | {"checkpoint": {"export": "hf"}}


def test_a_stage_that_removes_tokens_has_its_data_and_no_training() -> None:
    distilled = {"checkpoint": {"export": "onnx"}, "prune": {"sparsity": 0.5, "steps": [1, 2]}}
    found = parse_chain(chain(SMALLER, WORDS, LARGE | {"prune": None}, **distilled))
    assert [stage.name for stage in found.stages] == ["base", "words", "smaller"]
    words, smaller = found["words"], found["smaller"]
    assert words.vocabulary is not None
    assert (words.vocabulary.of, words.vocabulary.at_least, words.needs) == ("stage:base", 2, ("base",))
    assert (words.job.workload.model, words.job.data.tokenizer) == ("hf:stage:base", "stage:base")
    assert words.job.data.sources == found["base"].job.data.sources
    assert (words.job.prune, words.job.checkpoint.export) == (None, "hf")
    assert smaller.needs == ("words",)
    assert found.tokenizer_origin(smaller) is words
    for placed in (found, found.with_paths(Path("/here"))):
        assert parse_chain(placed.document()) == placed
    of_folder = parse_chain(chain({"name": "words", "vocabulary": {"of": "hf:base"}})).with_paths(
        Path("/here")
    )
    job = of_folder["words"].job
    assert (job.workload.model, job.data.tokenizer, job.checkpoint.export) == (
        "hf:/here/base",
        "/here/base",
        None,
    )
    assert parse_chain(of_folder.document()) == of_folder


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        ([LARGE, WORDS | {"vocabulary": {"at_least": 2}}], "stages.words.vocabulary: of: is missing"),
        ([LARGE, WORDS | {"vocabulary": {"of": "stage:base", "at_least": 0}}],
         "stages.words.vocabulary: at_least: should be greater"),
        ([LARGE, WORDS | {"prune": {}, "workload": {"changes": {}}}],
         "words removes tokens and trains nothing, so prune, workload.changes has no effect; leave it out"),
        ([BASE, WORDS], "stages.words.vocabulary.of: base has no export for transformers; "
         "set checkpoint.export of base to hf"),
        ([LARGE, WORDS | {"vocabulary": {"of": "stage:base@4"}}], "a folder has no step; leave out @4"),
        ([LARGE, SMALLER | {"workload": {"model": "stage:base"}, "data": {"tokenizer": "stage:base"}, "distill": None}],
         "base trains the weights of a model; name it in workload.init_from, and give the model here"),
        ([LARGE, WORDS, SMALLER | {"data": {"tokenizer": "stage:base"}}],
         "stages.smaller.workload.model: the tokenizer is not that of words; set data.tokenizer to stage:words"),
        ([LARGE, WORDS, {"name": "more", "workload": {"init_from": "stage:words"}}],
         "stages.more.workload.init_from: words has no checkpoints; name it in workload.model"),
    ],
)  # fmt: skip
def test_a_stage_that_removes_tokens_is_refused_in_one_line(stages: list[Any], wanted: str) -> None:
    with pytest.raises(InputError) as found:
        parse_chain(chain(*stages, checkpoint={"export": None}))
    assert wanted in str(found.value)
    assert "\n" not in str(found.value)
