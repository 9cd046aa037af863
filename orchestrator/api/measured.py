"""The quality of a commit, and text from it, for `Run.evaluate` and `Run.generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError
from orchestrator.config.paths import absolute
from orchestrator.config.spec import parse
from orchestrator.data.progress import silent
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.evaluate.on_tasks import run_tasks
from orchestrator.evaluate.samples import continue_prompts
from orchestrator.evaluate.task_files import read_tasks
from orchestrator.launch.submission import no_cluster
from orchestrator.resolve.chat import chat_of
from orchestrator.resolve.commit_model import model_of_commit
from orchestrator.resolve.prepared_data import PreparedData, prepared, tokens_of
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.storage.run_directory import RunDir
from workloads.workload import Sampling


class CommitOfRun:
    """A commit of a run, by the job that the run has stored."""

    def __init__(self, run: RunDir, commit: CommitManifest, raw: bool) -> None:
        """`raw`: the weights of training where the job has an average of them. Raises InputError without a job."""
        spec = read_job(run)
        if spec is None:
            raise InputError("there is no run here", run.uri, "give a run directory")
        self._run = run
        self._spec = spec
        self._commit = commit
        self._raw = raw

    def evaluate(
        self, on: dict[str, str], tasks: Sequence[str], address: str | None
    ) -> dict[str, dict[str, float]]:
        """Return the metrics by set and task, see `Run.evaluate`."""
        files = read_tasks([absolute(path, Path.cwd()) for path in tasks], where="tasks")
        metrics: dict[str, dict[str, float]] = {}
        if on or not files:
            metrics |= self._on_text({name: absolute(uri, Path.cwd()) for name, uri in on.items()}, address)
        if files:
            place = {"run": self._run.uri, "step": self._commit.step, "raw": self._raw}
            metrics |= run_tasks(files, place, self._spec.resources.per_worker.bundle)["sets"]
        return metrics

    def generate(self, prompts: Sequence[str], tokens: int, sampling: Sampling, bare: bool) -> list[str]:
        """Return the model's text after each prompt, see `Run.generate`."""
        if self._spec.data.samples is not None:
            raise InputError("a model of own samples continues no text", self._run.uri, "call its model()")
        found = model_of_commit(self._run, self._spec, self._commit, self._raw)
        with wrong_input("prompts"):
            return continue_prompts(
                found.workload,
                found.read,
                tokenizer=found.tokens.tokenizer(),
                prompts=prompts,
                max_tokens=tokens,
                sampling=sampling,
                chat=None if bare else chat_of(found.spec, found.tokens),
            )

    def _on_text(self, texts: dict[str, str], address: str | None) -> dict[str, dict[str, float]]:
        """Return the metrics on the job's held-out sets and on `texts`. What is not prepared yet is, with Ray."""
        from cluster.local.ray_session import NoCluster, connected_ray

        spec = parse(self._with_sets(texts), "on")
        sets: dict[str, str] = {}
        if spec.set_sources:
            tokens = tokens_of(spec, self._run, self._commit.meta["data"])
            before = PreparedData(tokens.folder.uri, self._commit.meta.get("sets", {}))
            is_own = spec.data.samples is not None
            try:
                with contextlib.nullcontext() if is_own else connected_ray(address):
                    sets = prepared(spec, self._run, before, silent).sets
            except NoCluster as error:
                raise no_cluster(error, address) from None
        return evaluate_commit(spec, self._run, self._commit, sets, self._raw)["sets"]

    def _with_sets(self, texts: dict[str, str]) -> dict[str, Any]:
        """Return the job's document with further held-out sets. Raises InputError if it then has no set."""
        data = self._spec.data
        document = self._spec.model_dump(mode="json")
        document["evaluate"] = document["evaluate"] or {}
        sets = document["evaluate"].setdefault("sets", {})
        if texts and data.samples is not None:
            raise InputError("the run reads samples of its own and no text", "on", "leave it out")
        if texts:
            field = document["data"]["sources"][0]["field"]
            sets |= {name: {"sources": [{"uri": uri, "field": field}]} for name, uri in texts.items()}
        if not sets and data.validation is None and not document["evaluate"].get("samples"):
            raise InputError("the run holds no text out", "on", "name some, as in {'wiki': 'wiki/*.txt'}")
        return document
