"""The quality of a commit, and text from it, for `Run.evaluate` and `Run.generate` and their commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.evaluate.on_tasks import run_tasks
from orchestrator.evaluate.samples import continue_prompts
from orchestrator.evaluate.speaker import Speaker, speaker_of
from orchestrator.evaluate.task_files import TaskFile
from orchestrator.launch.preparation import prepared_with_progress
from orchestrator.resolve.chat import chat_of
from orchestrator.resolve.commit_model import model_of_commit
from orchestrator.resolve.prepared_data import PreparedData, tokens_of
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.storage.row_types import EvaluationRow
from orchestrator.storage.run_directory import RunDir
from workloads.workload import Sampling


class CommitOfRun:
    """A commit of a run, by the job that the run has stored, with averaged weights where the job has them."""

    def __init__(self, run: RunDir, commit: CommitManifest, raw: bool, where: str = "on") -> None:
        """
        Args:
            run: the run directory.
            commit: the commit.
            raw: whether to take the weights of training where the job has an average of them.
            where: what names further held-out sets, for messages.

        Raises InputError if the directory has no job.
        """
        spec = read_job(run)
        if spec is None:
            raise InputError("there is no run here", run.uri, "give a run directory")
        self._run = run
        self._spec = spec
        self._commit = commit
        self._raw = raw
        self._where = where
        self.model = spec.workload.model

    def on_text(self, texts: dict[str, str], address: str | None) -> EvaluationRow:
        """Return the metrics on the job's held-out sets and on these files. Text that is not prepared yet is prepared
        with Ray.

        Args:
            texts: a path or glob of text files for each name of a set.
            address: the address of the Ray cluster that prepares the text; None to start Ray on this machine.

        Raises:
            InputError: the files or the data of the run cannot be used.
        """
        spec = parse(self.with_sets(texts), self._where)
        sets: dict[str, str] = {}
        if spec.set_sources:
            tokens = tokens_of(spec.data, self._run, self._commit.meta["data"])
            before = PreparedData(tokens.folder.uri, self._commit.meta.get("sets", {}))
            sets = prepared_with_progress(spec, self._run, before, address).sets
        return evaluate_commit(spec, self._run, self._commit, sets, self._raw)

    def on_tasks(self, files: list[TaskFile]) -> EvaluationRow:
        """Return the metrics on these tasks."""
        checkpoint = {"run": self._run.uri, "step": self._commit.step, "raw": self._raw}
        return run_tasks(files, checkpoint, self._spec.resources.per_worker.bundle)

    def says(
        self, prompts: Sequence[str], tokens: int, sampling: Sampling, bare: bool
    ) -> tuple[list[str], bool]:
        """Let the model continue prompts.

        Args:
            prompts: the texts to continue.
            tokens: maximum number of tokens of each continuation.
            sampling: how tokens are drawn.
            bare: whether to give the model each prompt as it is, without the chat template.

        Returns:
            The text after each prompt, and whether the prompts were given as a user's messages.

        Raises:
            InputError: the model reads no text, or a prompt cannot be used.
        """
        if self._spec.data.samples is not None:
            problem = "a model of own samples cannot continue text"
            raise InputError(problem, self._run.uri, "load it by load_run(..).model()")
        loaded = model_of_commit(self._run, self._spec, self._commit, self._raw)
        chat = None if bare else chat_of(loaded.spec.data, loaded.spec.workload.objective, loaded.tokens)
        with wrong_input("prompts"):
            texts = continue_prompts(
                loaded.workload,
                loaded.read,
                tokenizer=loaded.tokens.tokenizer(),
                prompts=prompts,
                max_tokens=tokens,
                sampling=sampling,
                chat=chat,
                scheme=loaded.scheme,
            )
        return texts, chat is not None

    def speaker(self) -> Speaker:
        """Return its model in memory, to talk to. Raises InputError for a model of own samples."""
        if self._spec.data.samples is not None:
            problem = "a model of own samples cannot continue text"
            raise InputError(problem, self._run.uri, "load it by load_run(..).model()")
        loaded = model_of_commit(self._run, self._spec, self._commit, self._raw)
        chat = chat_of(loaded.spec.data, loaded.spec.workload.objective, loaded.tokens)
        tokenizer = loaded.tokens.tokenizer()
        return speaker_of(
            self._run.uri, loaded.workload, loaded.read, tokenizer, chat=chat, scheme=loaded.scheme
        )

    def with_sets(self, texts: dict[str, str]) -> dict[str, Any]:
        """Return the job's document with further held-out sets. Raises InputError if it then has no set."""
        data = self._spec.data
        document = self._spec.model_dump(mode="json")
        document["evaluate"] = document["evaluate"] or {}
        sets = document["evaluate"].setdefault("sets", {})
        if texts and data.samples is not None:
            raise InputError("the run reads own samples, not text", self._where, "leave it out")
        if texts:
            field = document["data"]["sources"][0]["field"]
            sets |= {name: {"sources": [{"uri": uri, "field": field}]} for name, uri in texts.items()}
        if not sets and data.validation is None and not document["evaluate"].get("samples"):
            hint = "name some files, as in wiki='wiki/*.txt'"
            raise InputError("the run has no held-out text", self._where, hint)
        return document
