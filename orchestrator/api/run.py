"""A run as a Python object: its rows and events, its model, and its end."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.api.job import Job
from orchestrator.api.place import existing_run, run_directory
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import read_job
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.checkpoint.resolve_checkpoint import read_chosen
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.config.paths import absolute
from orchestrator.config.spec import JobSpec
from orchestrator.launch.active_controller import Signs, ask_to_stop, not_driven
from orchestrator.observe.last_status import last_status, state_of
from orchestrator.storage.row_line import EVALS, EVENTS, METRICS, Row
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from cluster.jobs.ray_jobs import Jobs, Submission
    from orchestrator.api.background import BackgroundRun
    from orchestrator.api.measured import CommitOfRun
    from orchestrator.export.converted import Names

EVERY = 0.5
"""Seconds between reads of the status while waiting for a run."""
ROW = ("loss", "lr", "grad_norm", "tokens", "step_seconds")
"""Columns of the tables of a run that has no rows yet."""
COMMIT = ("position", "receipt", "created", "bytes", "loss", "problem")
FINAL = 60.0
"""Seconds that summary.json may appear after the final status."""


class RunFailed(RuntimeError):
    """A run failed; the message is its reason. The same call resumes from the last checkpoint."""


class Run:
    """A run, given by its run directory, wherever its controller is. Each call reads the files again."""

    def __init__(
        self,
        directory: RunDir,
        job: JobSpec,
        submission: tuple[Jobs | BackgroundRun, Submission] | None = None,
    ) -> None:
        """Open a run.

        Args:
            directory: the run directory.
            job: the job of the run.
            submission: the submission or background process that this process has started; None for other runs.
        """
        self._directory = directory
        self._spec = job
        self._submission = submission

    @property
    def uri(self) -> str:
        """The path or URI of the run directory."""
        return self._directory.uri

    @property
    def job(self) -> Job:
        """The job of the run, as stored at its start."""
        return Job(**(read_job(self._directory) or self._spec).model_dump(mode="json"))

    @property
    def status(self) -> dict[str, Any]:
        """Phase, step, attempt, layout, ranks and controller, as in `orchestrator status`; empty before the run begins.

        The phase is "lost" if no controller drives the run any more although it has not ended.
        """
        return self._of_this_submission(lambda: last_status(self._directory), "time")

    @property
    def state(self) -> str:
        """The state of the run, one of these texts.

        - "unknown": it has not begun.
        - "waiting": it waits for its turn in the cluster's queue, or for workers.
        - "prepare": text becomes token shards.
        - "start": ranks start and load the last checkpoint.
        - "train": steps are computed.
        - "stop": ranks end, because of a failure, a stop or another number of workers.
        - "evaluate", "export": training has ended, and the last checkpoint is evaluated or exported.
        - "done", "failed", "stopped": it has ended. "stopped" is with a checkpoint, by a limit or the user.
        - "lost": its controller ended without a word. `run` resumes it.

        A run from `submit` or from `run(block=False)` has the state of its process before it begins: "pending",
        "running", or at its end "done", "stopped", "failed" or "wrong input".
        """
        return self._state_by(self.status)

    def _state_by(self, status: Mapping[str, Any]) -> str:
        if status.get("phase"):
            return state_of(status)
        return "unknown" if self._submission is None else self._job_now().state

    @property
    def summary(self) -> dict[str, Any]:
        """The outcome, cost and speed of the run; empty before its end."""
        return self._of_this_submission(lambda: self._directory.read_json_or_empty("summary.json"), "ended")

    def metrics(self) -> pandas.DataFrame:
        """A row for each step, indexed by step: loss, learning rate, gradient norm, tokens, seconds and more."""
        return _by_step(self._directory.rows(METRICS), ROW)

    def events(self) -> pandas.DataFrame:
        """A row for each change of phase, with its reason."""
        import pandas

        return pandas.DataFrame(self._directory.rows(EVENTS))

    def evaluations(self) -> pandas.DataFrame:
        """A row for each evaluation, indexed by step, with a column for each metric, such as `validation.loss`."""
        from orchestrator.config.metric_names import by_name

        rows = [{"step": row["step"], **by_name(row["sets"])} for row in self._directory.rows(EVALS)]
        return _by_step(rows, ())

    def commits(self) -> pandas.DataFrame:
        """A row for each checkpoint, indexed by step: position, receipt, time, bytes and training loss.

        `problem` says why a checkpoint is unreadable; it is empty for all others.
        """
        store = self._store
        rows: list[dict[str, Any]] = []
        for step in store.steps():
            try:
                commit = store.manifest(step)
            except CorruptCommit as error:
                rows.append({"step": step, "problem": str(error)})
                continue
            except InputError:
                if step in store.steps():
                    raise
                continue  # a running job has removed it since
            result = (
                commit.position,
                commit.receipt,
                commit.created,
                commit.total_bytes,
                commit.meta.get("loss"),
                "",
            )
            rows.append({"step": step, **dict(zip(COMMIT, result, strict=True))})
        return _by_step(rows, COMMIT)

    def export(
        self,
        to: str | Path | None = None,
        step: int | None = None,
        raw: bool = False,
        form: str | None = None,
        names: Names | None = None,
        numbers: str | None = None,
        quantize: Literal["int8", "int4", "none"] | None = None,
        group: int | Literal["row"] | None = None,
        activations: Literal["none", "dynamic"] | None = None,
        mean_bits: float | None = None,
        max_bytes: int | None = None,
    ) -> str:
        """Export a commit to a folder: a model for transformers, or with form safetensors an own model under its own
        names.

        Args:
            to: the folder; by default `export` in the run directory.
            step: the step of the commit; by default that of the newest sound one.
            raw: whether to export the weights of training instead of their average, if the job has one.
            form: the form of the export, such as hf, adapter, dcp or gguf; by default that of the job.
            names: the names of the tensors in a dcp export.
            numbers: the format of the matrices in a gguf or onnx export.
            quantize: the integer format of the weights in an hf export.
            group: number of weights that share a scale, or row for one scale per row.
            activations: how activations are rounded.
            mean_bits: mean number of bits per weight, 4 to 8, for a mixture of int4 and int8.
            max_bytes: bytes that the tensors of such a mixture may have at most.

        Returns:
            The folder.

        Raises:
            InputError: no such commit or form exists, the options do not fit together, or `to` holds something else.
        """
        from orchestrator.export.converted import form_option
        from orchestrator.export.hugging_face import export
        from orchestrator.export.quantised import scheme_option

        target = self._directory.at("export") if to is None else run_directory("", to).uri
        scheme = scheme_option(form, quantize, None if group is None else str(group), activations)
        conversion = form_option(form, names, numbers, scheme, mean_bits=mean_bits, max_bytes=max_bytes)
        read_chosen(
            self._store, step, lambda number: export(self.uri, number, target, raw=raw, form=conversion)
        )
        return target

    def model(self, step: int | None = None, raw: bool = False) -> nn.Module:
        """Load the model of a commit on the CPU, in evaluation mode.

        Args:
            step: the step of the commit; by default that of the newest sound one.
            raw: whether to load the weights of training instead of their average, if the job has one.

        Returns:
            A model of transformers, the user's own module, or this project's model if transformers has no class for it.

        Raises:
            InputError: there is no such commit.
        """
        return read_chosen(self._store, step, lambda number: self._model(number, raw))

    def _model(self, step: int, raw: bool) -> nn.Module:
        from orchestrator.resolve.commit_model import model_of_run
        from workloads.errors import WorkloadError
        from workloads.inference import with_weights
        from workloads.own.object_reference import is_object_reference

        commit = model_of_run(self.uri, step, raw=raw)
        is_own = is_object_reference(commit.spec.workload.model)
        if not is_own:
            try:
                commit.workload.check_hf()
            except WorkloadError:
                return with_weights(commit.workload, commit.read, scheme=commit.scheme)
        with tempfile.TemporaryDirectory(prefix="orchestrator-model-") as folder:
            target = self.export(Path(folder) / "model", step, raw, form="safetensors" if is_own else "hf")
            if is_own:
                from orchestrator.export.own_model import load_own

                return load_own(target)
            from workloads.hf.check.compare import load

            result: nn.Module = load(target, strict=False)
            return result

    def evaluate(
        self,
        on: Mapping[str, str] | None = None,
        tasks: Sequence[str | Path] = (),
        step: int | None = None,
        raw: bool = False,
        address: str | None = None,
    ) -> dict[str, dict[str, float]]:
        """Evaluate a commit, the newest sound one by default, in a process on this machine. The run does not change.

        Args:
            on: further held-out sets: the files of each by name, as {"wiki": "wiki/*.txt"}.
            tasks: task files in lm-eval's format. Held-out text is then evaluated only if `on` names some.
            step: the step of the commit.
            raw: the weights of training where the job has an average of them.
            address: the cluster that prepares text that is not prepared yet, by default Ray on this machine.

        Returns:
            The metrics of each set and each task by name, as {"validation": {"loss": 2.31, ...}}.

        Raises InputError if there is no such commit, nothing to evaluate on, or a file is missing or wrong.
        """
        from orchestrator.evaluate.task_files import read_tasks

        files = read_tasks([absolute(str(path), Path.cwd()) for path in tasks], where="tasks")
        texts = {name: absolute(uri, Path.cwd()) for name, uri in (on or {}).items()}

        def metrics(number: int) -> dict[str, dict[str, float]]:
            commit = self._commit(number, raw)
            of_text = commit.on_text(texts, address)["sets"] if texts or not files else {}
            return {**of_text, **(commit.on_tasks(files)["sets"] if files else {})}

        return read_chosen(self._store, step, metrics)

    def generate(
        self,
        prompts: str | Sequence[str],
        tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        step: int | None = None,
        raw: bool = False,
        bare: bool = False,
    ) -> list[str]:
        """Continue prompts with the model of a commit, the newest sound one by default, in this process.

        A model trained on conversations answers each prompt as a user's message, unless `bare`.

        Args:
            prompts: one text, or several.
            tokens: the most tokens to add to each.
            temperature: 0 takes the likeliest token, above 0 tokens are sampled.
            seed: the seed of the sampling.
            step: the step of the commit.
            raw: the weights of training where the job has an average of them.
            bare: continue the bare text even if the model answers as a chat.

        Returns:
            The new text after each prompt, without the prompt.

        Raises InputError if there is no such commit, the model continues no text, or a number makes no sense.
        """
        from workloads.workload import Sampling

        if type(tokens) is not int or tokens < 1:
            raise InputError(f"must be an integer of at least 1 (got {tokens!r})", "tokens")
        if not 0.0 <= temperature < math.inf:
            raise InputError(f"must be a finite number of at least 0 (got {temperature!r})", "temperature")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        sampling = Sampling(temperature=temperature, seed=seed)
        return read_chosen(
            self._store,
            step,
            lambda number: self._commit(number, raw).says(texts, tokens, sampling, bare)[0],
        )

    def _commit(self, step: int, raw: bool) -> CommitOfRun:
        from orchestrator.api.measured import CommitOfRun

        return CommitOfRun(self._directory, self._store.manifest(step), raw)

    def stop(self, timeout: float | None = None) -> Run:
        """Ask the run to save a checkpoint and end, and wait at most `timeout` seconds for that.

        It works for every run whose directory can be written here, also for one of another process. The same call of
        `run` resumes the run.

        Raises InputError if the run has ended or no controller drives it, RunFailed if it fails, and TimeoutError.
        """
        if self._submission is not None:
            jobs, job = self._submission[0], self._job_now()
            if job.has_ended:
                raise InputError("this run has ended already", self.uri, "see Run.state")
            jobs.stop(job.id)
            return self.wait(timeout)
        request = ask_to_stop(self._directory)
        return self._wait(timeout, request.ask)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait at most `timeout` seconds for the end of the run, or of its job if it was submitted. Raises RunFailed if
        the run fails or no controller is active for it any more, and TimeoutError."""
        return self._wait(timeout, lambda _: None)

    def delete(self) -> None:
        """Remove the run directory with everything in it for good, as `orchestrator runs --remove` does.

        Raises InputError if the run or its process has not ended, or if something holds one of its checkpoints.
        """
        from orchestrator.launch.stored_runs import remove

        if self._submission is not None and not self._job_now().has_ended:
            raise InputError("has not ended", self.uri, "Run.stop() ends it")
        remove(self.uri)

    def _wait(self, timeout: float | None, at_each_look: Callable[[dict[str, Any]], object]) -> Run:
        deadline = None if timeout is None else time.monotonic() + timeout
        ended: float | None = None
        signs = Signs()
        while True:
            status = self.status
            at_each_look(status)
            state = self._state_by(status)
            now = time.monotonic()
            is_silent = signs.show_no_controller(status)
            if self._submission is not None:
                if self._job_now().has_ended:
                    break
            elif state in ENDED:
                ended = now if ended is None else ended
                if self.summary or now - ended > FINAL:
                    break
            elif is_silent:
                raise RunFailed(
                    f"{not_driven(self.uri)}; the same command continues from its last checkpoint"
                )
            if deadline is not None and now > deadline:
                raise TimeoutError(f"{self.uri} is at {state} after {timeout:g} s")
            time.sleep(EVERY)
        job = None if self._submission is None else self._job_now()
        if self.state == Outcome.FAILED or (job and job.state in (Outcome.FAILED, Outcome.WRONG_INPUT)):
            raise RunFailed(self.summary.get("reason") or (job and job.message) or "see events()")
        return self

    def _of_this_submission(self, read: Callable[[], dict[str, Any]], time_key: str) -> dict[str, Any]:
        """What `read` returns. For a submitted run, ignore what was written before the submission, unless the job is
        done: the job of a finished run writes nothing."""
        result = read()
        if result and self._submission is not None:
            _, job = self._submission
            if job.came_after(result.get(time_key)):
                is_done = self._job_now().state == Outcome.DONE
                return read() if is_done else {}
        return result

    def _job_now(self) -> Submission:
        assert self._submission is not None
        jobs, job = self._submission
        if not job.has_ended:
            self._submission = jobs, job = jobs, jobs.get(job.id)
        return job

    @property
    def _store(self) -> Store:
        return Store(self._directory.commits)

    def __repr__(self) -> str:
        return f"Run({self.uri!r}, {self.state})"


def _by_step(rows: Sequence[Row], columns: Sequence[str]) -> pandas.DataFrame:
    """The rows indexed by step; an empty table with `columns` if there are no rows."""
    import pandas

    return pandas.DataFrame(rows, columns=None if rows else ["step", *columns]).set_index("step")


def load_run(place: str | Path) -> Run:
    """The run in a run directory, or with that name in the folder `runs`, as the commands find it.

    Raises InputError if it does not exist; for a bare name it names both places.
    """
    return Run(*existing_run(place))
