"""A job file with `stages`: a chain of jobs, each of which may start from an earlier stage's results.

Each stage has the keys of a job. Keys beside `stages` are defaults for all stages: a stage's mapping is merged into
the file's, any other value replaces it. Stages refer to each other as `stage:<name>`.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.commit_steps import regular_before
from orchestrator.config.document import STAGES, read_document
from orchestrator.config.errors import InputError
from orchestrator.config.paths import REFERENCE, absolute, resolve_paths
from orchestrator.config.spec import JobSpec, parse
from orchestrator.config.strict import Count, Positive, StrictModel
from orchestrator.config.validation_messages import input_error
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.config import TrainedTokenizer

INIT = "workload.init_from"
CONTINUE = "train.continue_from"
TEACHER = "distill.teacher"
MODEL = "workload.model"
TOKENIZER = "data.tokenizer"
COMPRESS = "compress"
"""The keys of a job that may name a stage."""
VOCABULARY = "vocabulary"
"""The key of a stage that trains nothing, but removes tokens."""
COUNTS = ("seed", "data", "evaluate", "accept_code")
"""The keys of a job that such a stage reads: its data and how to prepare it."""
COUNTS_OF = {"workload": ("objective", "options"), "train": ("steps", "global_batch")}
"""The keys of sections that it reads in part. Those of `train` only make it a valid job."""
FOLDER = "hf:"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,30}")
LONGEST = 62
"""Maximum number of characters of the chain's and a stage's name together. Joined by a hyphen, they name a run."""
OF_SEEDS = "-seeds"
"""The suffix of the name of a chain that trains one job with several seeds."""
RESERVED = frozenset({"checkpoints"})
"""Names that a stage cannot have, because a run directory uses them for something else."""


class CompressSpec(StrictModel):
    """The share of one stage's metric that the exports of a chain must keep, if it makes a model smaller or faster.

    Every stage with an export is measured as soon as it is done. One that keeps too little fails, and the chain with
    it. At the end all exports are timed in turns.
    """

    keep: float = Field(
        gt=0.0,
        le=1.0,
        description="least share of the teacher's metric that every export keeps, such as 0.97",
    )
    held_out: str = Field(
        min_length=1, description="files of held-out rows, with the columns of the stages' data"
    )
    metric: str | None = Field(
        default=None, description="the metric to keep; unset: accuracy of classes, else perplexity"
    )
    teacher: str | None = Field(
        default=None,
        description="the stage, or the folder of an export, with which the others are compared; unset: the first stage "
        "with an export",
    )
    samples: Positive = Field(default=2000, description="most held-out samples to read")
    rounds: Count = Field(default=20, description="rounds in which each export is timed; 0 to time none")


class VocabularySpec(StrictModel):
    """A stage that trains nothing: it copies a pretrained model without the tokens that the stage's data rarely uses.

    The tokenizer is copied with the entries that are left. Other stages name the copy as `stage:<name>` in
    workload.model, data.tokenizer and distill.teacher.
    """

    of: str = Field(
        min_length=1,
        description="the model: stage:<name> of a stage with checkpoint.export hf, or a pretrained folder",
    )
    at_least: Positive = Field(
        default=1,
        description="remove tokens that the data uses less often; shorter tokens replace them",
    )


class Input(NamedTuple):
    """The part of another stage that a stage begins with.

    It is named at `key`: the stage's commit at `tag` (a step, `last` or `best`), its tokenizer, or its folder.
    """

    key: str
    stage: str
    tag: str


@dataclass(frozen=True)
class Stage:
    """One stage. `name` also names its run directory, within the chain's. `job` is as written in the file.

    A stage with a `vocabulary` trains nothing. Its job has the model and the data.
    """

    name: str
    job: JobSpec
    vocabulary: VocabularySpec | None = None

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """Return what the stage takes from other stages."""
        before = self.job.train.continue_from
        references = {
            INIT: self.job.workload.init_from,
            CONTINUE: before and before.run,
            TEACHER: self.job.distill and self.job.distill.teacher,
            MODEL: self.job.workload.model.removeprefix(FOLDER),
            TOKENIZER: self.job.data.tokenizer,
        }
        return tuple(
            Input(key, *_name_and_tag(text))
            for key, text in references.items()
            if isinstance(text, str) and text.startswith(REFERENCE)
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the names of the stages that must finish before it."""
        return tuple(dict.fromkeys(each.stage for each in self.inputs))

    @property
    def begins_with(self) -> Input | None:
        """Return the input for its initial weights, if another stage provides them."""
        return next((each for each in self.inputs if each.key == INIT), None)

    @property
    def made_of(self) -> Input | None:
        """Return the input for its model's folder, if another stage writes it."""
        return next((each for each in self.inputs if each.key == MODEL), None)

    @property
    def learns_from(self) -> Input | None:
        """Return the teacher, if another stage trains it."""
        return next((each for each in self.inputs if each.key == TEACHER), None)

    @property
    def continues(self) -> Input | None:
        """Return the commit of another stage that it continues, with its complete state."""
        return next((each for each in self.inputs if each.key == CONTINUE), None)


@dataclass(frozen=True)
class ChainSpec:
    """A chain: its stages, ordered so that each comes after those that it needs."""

    name: str
    stages: tuple[Stage, ...]
    compress: CompressSpec | None = None

    @property
    def exporting(self) -> tuple[Stage, ...]:
        """Return the stages with an export, the teacher first if it is one; none without `compress`."""
        teacher = self.compress.teacher if self.compress else None
        stages = [stage for stage in self.stages if self.compress and stage.job.checkpoint.export]
        return tuple(sorted(stages, key=lambda stage: stage.name != teacher))

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def after(self, name: str) -> list[str]:
        """Return the names of all stages that need this one, directly or indirectly."""
        names = {name}
        for stage in self.stages:
            if names.intersection(stage.needs):
                names.add(stage.name)
        return [stage.name for stage in self.stages if stage.name in names - {name}]

    def tokenizer_origin(self, stage: Stage) -> Stage:
        """Return the stage that owns the tokenizer of `stage`: itself, or the end of its references. A stage that
        removes tokens owns what is left.
        """
        while not stage.vocabulary and (
            named := next((each for each in stage.inputs if each.key == TOKENIZER), None)
        ):
            stage = self[named.stage]
        return stage

    def with_paths(self, base: Path) -> ChainSpec:
        """Return the chain with relative local paths made absolute against `base`."""
        stages = tuple(_placed(each, base) for each in self.stages)
        compress = self.compress
        if compress:
            teacher = str(compress.teacher)
            placed = teacher if teacher in {each.name for each in stages} else absolute(teacher, base)
            compress = compress.model_copy(
                update={"held_out": absolute(compress.held_out, base), "teacher": placed}
            )
        return ChainSpec(self.name, stages, compress)

    def document(self) -> dict[str, Any]:
        """Return the chain as a job file in which every stage has all of its keys."""
        stages = [_document(stage) for stage in self.stages]
        compress = {COMPRESS: self.compress.model_dump(mode="json")} if self.compress else {}
        return {"name": self.name, STAGES: stages, **compress}


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec | ChainSpec:
    """Read and validate the job file at `path`, of a job or of a chain. Raises InputError.

    `overrides` have the form `a.b=c`. A stage's keys are stages.<name>.<key>.
    """
    document = read_document(path, overrides)
    return parse_chain(document, str(path)) if STAGES in document else parse(document, str(path))


def parse_chain(document: Mapping[str, Any], where: str = "job") -> ChainSpec:
    """Validate a chain given as a mapping. `where` is for messages. Raises InputError."""
    name = document.get("name")
    stage_documents = document[STAGES]
    if not isinstance(name, str):
        raise InputError("is missing", f"{where}: name", "name the chain")
    if not isinstance(stage_documents, list) or not stage_documents:
        raise InputError("must be a list of stages", f"{where}: {STAGES}", "give each a name and its keys")
    common = {key: value for key, value in document.items() if key not in (STAGES, COMPRESS, "name")}
    stages: list[Stage] = []
    for number, stage_document in enumerate(stage_documents):
        stage = _name_of(stage_document, f"{where}: {STAGES}.{number}", [stage.name for stage in stages])
        stage_where = f"{where}: {STAGES}.{stage}"
        if len(name) + len(stage) > LONGEST:
            raise InputError(
                f"{name}-{stage} is longer than {LONGEST + 1} characters", stage_where, "shorten one of them"
            )
        stages.append(_stage(stage, stage_document, common, f"{name}-{stage}", stage_where))
    ordered = _ordered(stages, where)
    chain = ChainSpec(name, ordered, _compress(document.get(COMPRESS), ordered, where))
    for each in chain.stages:
        _check_inputs(chain, each, f"{where}: {STAGES}.{each.name}")
    _check_together(chain, where)
    return chain


def _stage(
    name: str, document: Mapping[str, Any], common: Mapping[str, Any], job_name: str, where: str
) -> Stage:
    """Return a stage from its keys and the defaults of all stages. Raises InputError."""
    vocabulary = None
    if (given := document.get(VOCABULARY)) is not None:
        try:
            vocabulary = VocabularySpec.model_validate(given)
        except ValidationError as error:
            raise input_error(error, f"{where}.{VOCABULARY}", VocabularySpec) from None
        own = _keys_of_vocabulary(name, document, common, vocabulary, where)
    else:
        own = merged(common, {key: value for key, value in document.items() if key != VOCABULARY})
        workload = own.get("workload")
        if isinstance(workload, dict) and str(workload.get("model")).startswith(REFERENCE):
            own["workload"] = {**workload, "model": f"{FOLDER}{workload['model']}"}
    job = parse({**own, "name": job_name}, where)
    if job.tune is not None:
        raise InputError("a stage cannot be a search", f"{where}.tune", "leave it out")
    return Stage(name, job, vocabulary)


def _keys_of_vocabulary(
    name: str,
    document: Mapping[str, Any],
    common: Mapping[str, Any],
    vocabulary: VocabularySpec,
    where: str,
) -> dict[str, Any]:
    """Return the keys of the job of a stage that removes tokens. Raises InputError for a key that has no effect."""
    unused = sorted(document.keys() - {"name", VOCABULARY, *COUNTS, *COUNTS_OF})
    for section, keys in COUNTS_OF.items():
        if isinstance(given := document.get(section), dict):
            unused += [f"{section}.{key}" for key in sorted(given.keys() - {*keys})]
    if unused:
        problem = f"{name} removes tokens and trains nothing, so {', '.join(unused)} has no effect"
        raise InputError(problem, where, "leave it out")
    whole = merged(common, dict(document))
    own = {key: whole[key] for key in COUNTS if key in whole}
    for section, keys in COUNTS_OF.items():
        given = whole.get(section)
        own[section] = {key: given[key] for key in keys if key in given} if isinstance(given, dict) else given
    own["train"] = merged({"steps": 1, "global_batch": 1}, own["train"] or {})
    folder = vocabulary.of.removeprefix(FOLDER)
    for section, key, value in (("workload", "model", f"{FOLDER}{folder}"), ("data", "tokenizer", folder)):
        if isinstance(own.get(section) or {}, dict):
            own[section] = {**(own.get(section) or {}), key: value}
    # `compress` measures stages that have an export. A pretrained folder may not have learned the task yet, so its copy
    # is not measured.
    return own | {"checkpoint": {"export": "hf" if folder.startswith(REFERENCE) else None}}


def _placed(stage: Stage, base: Path) -> Stage:
    """Return the stage with relative local paths made absolute against `base`."""
    job = resolve_paths(stage.job, base)
    vocabulary = stage.vocabulary
    if vocabulary:
        vocabulary = vocabulary.model_copy(update={"of": job.data.tokenizer})
    return Stage(stage.name, job, vocabulary)


def _document(stage: Stage) -> dict[str, Any]:
    """Return a stage with all of its keys."""
    document = stage.job.model_dump(mode="json") | {"name": stage.name}
    if stage.vocabulary is None:
        return document
    parts = {section: {key: document[section][key] for key in keys} for section, keys in COUNTS_OF.items()}
    own = {key: document[key] for key in ("name", *COUNTS)}
    return own | parts | {VOCABULARY: stage.vocabulary.model_dump(mode="json")}


def _compress(document: Any, stages: Sequence[Stage], where: str) -> CompressSpec | None:
    """Return the key `compress` of a chain of these stages. Raises InputError."""
    if document is None:
        return None
    key = f"{where}: {COMPRESS}"
    try:
        compress = CompressSpec.model_validate(document)
    except ValidationError as error:
        raise input_error(error, key, CompressSpec) from None
    exporting = [stage.name for stage in stages if stage.job.checkpoint.export]
    is_folder = compress.teacher is not None and "/" in compress.teacher
    if len(exporting) + is_folder < 2:
        hint = "set checkpoint.export of the teacher's stage and of one that begins after it"
        raise InputError("compares exports, but fewer than two stages make one", key, hint)
    teacher = compress.teacher or exporting[0]
    if not is_folder and teacher not in exporting:
        hint = f"name one of {', '.join(exporting)}, or a folder as ./folder"
        raise InputError(f"{teacher} is not a stage with an export", f"{key}.teacher", hint)
    return compress.model_copy(update={"teacher": teacher})


def chain_of_seeds(job: Mapping[str, Any], count: int) -> ChainSpec:
    """Return a chain that runs one job, given as a document with all of its keys, under `count` seeds: the job's seed
    and those after it, a stage for each.

    Raises InputError if the names become too long, the job continues another run, or all seeds would write to one
    place.
    """
    if job["train"]["continue_from"] is not None:
        hint = "begin with its weights: replace train.continue_from by workload.init_from"
        raise InputError("trains each seed from its beginning, and this job continues a run", "--seeds", hint)
    output_keys = [("checkpoint", "export_to"), ("checkpoint", "push"), ("tracking", "register_as")]
    for section, key in output_keys:
        if output := (job[section] or {}).get(key):
            hint = f"leave it out with `--set {section}.{key}=null`, and export the seed that you choose"
            raise InputError(f"all seeds would write to {output}", f"--seeds: {section}.{key}", hint)
    seeds = range(job["seed"], job["seed"] + count)
    stages = [{"name": seed_name(seed), "seed": seed} for seed in seeds]
    chain_keys = {"name": f"{job['name']}{OF_SEEDS}", "tune": None, STAGES: stages}
    return parse_chain({**job, **chain_keys}, "--seeds")


def seed_name(seed: int) -> str:
    """Return the name of a seed's stage in a chain of seeds."""
    return f"seed-{seed}"


def schema() -> str:
    """Return the JSON Schema of a job file, which holds a job or a chain."""
    job = JobSpec.model_json_schema()
    definitions = job.pop("$defs")
    keys = {key: {"description": "the default of all stages"} for key in job["properties"]}
    named_object = {
        "type": "object",
        "required": ["name"],
        "properties": {key: {} for key in job["properties"]}
        | {VOCABULARY: VocabularySpec.model_json_schema()},
    }
    compress = CompressSpec.model_json_schema()
    stage = named_object | {
        "additionalProperties": False,
        "description": "a job; its other keys are the top-level keys of the file",
    }
    chain = {
        "title": "Chain",
        "description": "Several jobs; each may start from an earlier one's results.",
        "type": "object",
        "required": ["name", STAGES],
        "properties": keys | {STAGES: {"type": "array", "minItems": 1, "items": stage}, COMPRESS: compress},
        "additionalProperties": False,
    }
    return json.dumps({"$defs": definitions, "anyOf": [job, chain]}, indent=2)


def merged(default: Any, stage_value: Any) -> Any:
    """Merge a stage's value of a key with the file's default."""
    if isinstance(default, dict) and isinstance(stage_value, dict):
        return {**default, **{key: merged(default.get(key), value) for key, value in stage_value.items()}}
    return copy.deepcopy(stage_value)


def _name_of(document: Any, where: str, others: Sequence[str]) -> str:
    if not isinstance(document, dict):
        raise InputError("must be a mapping of keys to values", where, "give the stage a name and its keys")
    name = document.get("name")
    if name is None:
        raise InputError("is missing", f"{where}.name", "give each stage a name")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
        hint = "use letters, digits, hyphens and underscores, a letter first"
        raise InputError(f"{name!r} cannot be the name of a stage", f"{where}.name", hint)
    if name in others:
        raise InputError(f"there are two stages of the name {name}", f"{where}.name", "rename one of them")
    return name


def _name_and_tag(text: str) -> tuple[str, str]:
    name, _, tag = text.removeprefix(REFERENCE).partition("@")
    return name, tag or "last"


def _ordered(stages: Sequence[Stage], where: str) -> tuple[Stage, ...]:
    """Return the stages, each after those that it needs, else in the file's order. Raises InputError."""
    names = [stage.name for stage in stages]
    for stage in stages:
        for key, other, _ in stage.inputs:
            key_path = f"{where}: {STAGES}.{stage.name}.{key}"
            if other == stage.name:
                raise InputError(f"{stage.name} names itself", key_path, "name an earlier stage")
            if other not in names:
                near = difflib.get_close_matches(other, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the stages are {', '.join(names)}"
                raise InputError(f"there is no stage {other!r}", key_path, hint)
    ordered: list[Stage] = []
    while len(ordered) < len(stages):
        ordered_names = {stage.name for stage in ordered}
        ready = [s for s in stages if s.name not in ordered_names and ordered_names.issuperset(s.needs)]
        if not ready:
            left = {stage.name: stage.needs for stage in stages if stage.name not in ordered_names}
            circle = " needs ".join(_circle(left))
            raise InputError(f"{circle}: none of them can begin", f"{where}: {STAGES}", "break the circle")
        ordered.append(ready[0])
    return tuple(ordered)


def _circle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of a cycle, the first also at the end. Each of `needs` needs another one of them."""
    path = [next(iter(needs))]
    while path[-1] not in path[:-1]:
        path.append(next(other for other in needs[path[-1]] if other in needs))
    return path[path.index(path[-1]) :]


def _check_inputs(chain: ChainSpec, stage: Stage, where: str) -> None:
    """Raise InputError if an input of the stage will not exist."""
    for key, name, tag in stage.inputs:
        key_path = f"{where}.{key}"
        other = chain[name].job
        if stage.vocabulary:
            key_path = f"{where}.{VOCABULARY}.of"
        if key == MODEL or (chain[name].vocabulary and key != TOKENIZER):
            _check_folder(chain, stage, Input(key, name, tag), key_path)
        elif key == TOKENIZER:
            if tag != "last":
                raise InputError("a stage has one tokenizer", key_path, f"leave out @{tag}")
        elif other.workload.adapter and key in (INIT, TEACHER):
            _check_adapted(other.checkpoint, name, tag, key_path)
        elif tag == "best":
            if other.checkpoint.best_metric is None:
                hint = f"set checkpoint.keep_best of {name} to a metric, or name @last"
                raise InputError(f"{name} keeps no best commit by a metric", key_path, hint)
        elif tag != "last" and not _keeps(other.checkpoint, other.train.steps, tag):
            hint = "name @last, or set checkpoint.keep_every so that it is kept"
            raise InputError(f"{name} will have no commit at {tag} when it is done", key_path, hint)
    base = stage.begins_with or stage.continues
    if base and isinstance(stage.job.data.tokenizer, TrainedTokenizer):
        _check_same_tokenizer(chain, stage.job.data, chain[base.stage], where)


def _check_folder(chain: ChainSpec, stage: Stage, named: Input, where: str) -> None:
    """Raise InputError if the input is not a folder that the other stage writes: a model with fewer tokens, or for a
    stage that removes tokens an export.
    """
    other = chain[named.stage]
    if named.tag != "last":
        raise InputError("a folder has no step", where, f"leave out @{named.tag}")
    if other.vocabulary is None:
        if stage.vocabulary is None:
            hint = f"name it in {INIT}, and give the model here"
            raise InputError(f"{other.name} trains the weights of a model", where, hint)
        if other.job.checkpoint.export != "hf":
            hint = f"set checkpoint.export of {other.name} to hf"
            raise InputError(f"{other.name} has no export for transformers", where, hint)
    elif named.key not in (MODEL, TEACHER):
        raise InputError(f"{other.name} has no checkpoints", where, f"name it in {MODEL}")
    elif named.key == MODEL and not stage.vocabulary and chain.tokenizer_origin(stage) is not other:
        hint = f"set {TOKENIZER} to {REFERENCE}{other.name}"
        raise InputError(f"the tokenizer is not that of {other.name}", where, hint)


def _check_adapted(checkpoint: CheckpointSpec, name: str, tag: str, where: str) -> None:
    """Raise InputError if the input is a commit of a stage that trains an adapter: only its export has the merged
    model.
    """
    exported = "best" if checkpoint.best_metric else "last"
    if checkpoint.export != "hf":
        hint = f"set checkpoint.export of {name} to hf, which has both merged"
        raise InputError(f"{name} trains an adapter, but its commits lack its base", where, hint)
    if tag != exported:
        problem = f"{name} trains an adapter and exports only @{exported}"
        raise InputError(problem, where, f"use @{exported}")


def _keeps(checkpoint: CheckpointSpec, steps: int, tag: str) -> bool:
    """Return whether the commit at that step still exists when the job is done."""
    if not tag.isdecimal():
        return False
    step = int(tag)
    kept = {steps, *regular_before(steps, checkpoint.every, checkpoint.keep - 1)}
    return step in kept or bool(
        checkpoint.keep_every and 0 < step <= steps and step % checkpoint.keep_every == 0
    )


def _check_same_tokenizer(chain: ChainSpec, data: DataSpec, base: Stage, where: str) -> None:
    """Raise InputError if the stage trains a new tokenizer: its token ids would not be those that the base learnt."""
    origin = chain.tokenizer_origin(base)
    ours, theirs = (
        ([each.uri for each in config.sources], config.tokenizer) for config in (data, origin.job.data)
    )
    if ours != theirs:
        hint = f"set it to {REFERENCE}{base.name}"
        problem = f"trains another tokenizer than that of {base.name}, whose weights it begins with"
        raise InputError(problem, f"{where}.{TOKENIZER}", hint)


def _check_together(chain: ChainSpec, where: str) -> None:
    """Raise InputError if stages share what must be separate, or differ in what must be the same."""
    exports: dict[str, str] = {}
    for stage in chain.stages:
        if target := stage.job.checkpoint.export_to:
            if target in exports:
                problem = f"{exports[target]} and {stage.name} are exported to the same folder"
                raise InputError(
                    problem, f"{where}: checkpoint.export_to", "give each stage its own, or none"
                )
            exports[target] = stage.name
    repositories: dict[str, str] = {}
    for stage in chain.stages:
        if repo := stage.job.checkpoint.push:
            if repo in repositories:
                problem = f"{repositories[repo]} and {stage.name} are pushed to the same repository"
                raise InputError(problem, f"{where}: checkpoint.push", "set it for one stage, or for none")
            repositories[repo] = stage.name
    tracked = {
        (each.job.tracking.uri, each.job.tracking.experiment) for each in chain.stages if each.job.tracking
    }
    if len(tracked) > 1:
        problem = "the stages of a chain share one MLflow run, and these name several servers or experiments"
        raise InputError(problem, f"{where}: tracking", "set uri and experiment once, at the top level")
