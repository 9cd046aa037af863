"""The stages of a chain as runs: the directory of each, and its job with the names of other stages resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.config.chain import CONTINUE, MODEL, TOKENIZER, ChainSpec, Stage
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.encoding.config import TrainedTokenizer
from orchestrator.resolve.prepared_data import EXCERPT, data_cache
from orchestrator.storage.run_directory import RunDir
from workloads.own.object_reference import is_object_reference


@dataclass(frozen=True)
class StageRun:
    """A stage as a run: its job, in which other stages are replaced by their run directories, and its own directory."""

    stage: Stage
    job: JobSpec
    run: RunDir

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name


def stage_runs(chain: ChainSpec, root: RunDir) -> dict[str, StageRun]:
    """Return the stages of a chain in the directory `root`, by name. A stage comes after those that it needs."""
    return {
        stage.name: StageRun(stage, placed(chain, stage, root), RunDir(root.at(stage.name)))
        for stage in chain.stages
    }


def export_of(stage: StageRun) -> str:
    """Return the folder of a stage's export."""
    return stage.job.checkpoint.export_to or stage.run.at("export")


def export_folder(chain: ChainSpec, root: RunDir, name: str) -> str:
    """Return the folder of the export of a chain's stage, given the directory of the chain."""
    return chain[name].job.checkpoint.export_to or f"{root.at(name)}/export"


def placed(chain: ChainSpec, stage: Stage, root: RunDir) -> JobSpec:
    """Return the job of a stage with the names of other stages replaced by paths.

    Prepared data is kept beside the chain, as for other runs. A tokenizer that a stage trains is in that stage's run
    directory. The models of that stage and of those that use its tokenizer have a row for each entry that the job asks
    for, even if the text has fewer.
    """
    document = stage.job.model_dump(mode="json")
    data: dict[str, Any] = document["data"]
    workload: dict[str, Any] = document["workload"]
    data["cache"] = data_cache(stage.job.data, root)
    for key, other, tag in stage.inputs:
        folder = export_folder(chain, root, other)
        commit = f"{root.at(other)}@{tag}"
        if key == CONTINUE:
            document["train"]["continue_from"]["run"] = commit
        elif key == TOKENIZER:
            _place_tokenizer(chain, stage, root, data, workload)
        elif key == MODEL or chain[other].vocabulary:
            section, name = key.split(".")
            document[section][name] = f"hf:{folder}"
        else:
            section, name = key.split(".")
            # Commits of an adapter lack its base.
            document[section][name] = folder if chain[other].job.workload.adapter else commit
    return parse(document, f"stages.{stage.name}")


def _place_tokenizer(
    chain: ChainSpec, stage: Stage, root: RunDir, data: dict[str, Any], workload: dict[str, Any]
) -> None:
    """Replace the name of a stage in data.tokenizer."""
    origin = chain.tokenizer_origin(stage)
    trained = origin.job.data.tokenizer
    if stage.vocabulary:
        data["tokenizer"] = export_folder(chain, root, stage.needs[0])
    elif origin.vocabulary:
        data["tokenizer"] = export_folder(chain, root, origin.name)
    elif not isinstance(trained, TrainedTokenizer):
        data["tokenizer"] = trained
    else:
        data["tokenizer"] = f"{root.at(origin.name)}/{EXCERPT}"
        if not workload["model"].startswith("hf:") and not is_object_reference(workload["model"]):
            workload["changes"] = {"vocab_size": trained.recipe.vocabulary, **workload["changes"]}
