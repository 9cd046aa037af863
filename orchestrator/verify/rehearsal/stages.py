"""The stages of a rehearsal in order, and their results."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError, one_line
from orchestrator.config.outcome import Outcome
from orchestrator.config.packages import PACKAGES
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.layout import Layout
from orchestrator.planner.demand import demand_of
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.run_directory import RunDir
from orchestrator.verify.rehearsal.full_size import FullSizePlan
from orchestrator.verify.rehearsal.job import STEPS, Rehearsed, rehearsed
from orchestrator.verify.rehearsal.layouts import another

if TYPE_CHECKING:
    from orchestrator.launch.watched_run import RunOutcome, WatchedRun


LOOK = 0.1
"""Seconds between reads of a run's status."""


class Failed(Exception):
    """A stage did not reach its goal."""

    def __init__(self, problem: str, mend: str = "") -> None:
        super().__init__(problem)
        self.mend = mend


def follow(watched: WatchedRun, is_enough: Callable[[], bool]) -> RunOutcome | None:
    """Follow a run until `is_enough()`, or until it has ended; then return its outcome."""
    while not is_enough():
        if (outcome := watched.look()) is not None:
            return outcome
        time.sleep(LOOK)
    return None


def summary_at_end(watched: WatchedRun, step: int) -> dict[str, Any]:
    """Return the summary of a run that has reached a step and ended. Raises Failed."""
    outcome = follow(watched, lambda: False)
    assert outcome is not None
    summary = outcome.summary or {}
    if outcome.outcome in (Outcome.DONE, Outcome.STOPPED) and summary.get("step") == step:
        return summary
    raise failure(outcome)


def failure(outcome: RunOutcome) -> Failed:
    """Return why a run ended too early: the meaning of its last fault, the rank's last output, and the hint."""
    summary = outcome.summary or {}
    if outcome.outcome == Outcome.STOPPED:
        problem = f"the run ended after step {summary.get('step')}: {outcome.line}"
        return Failed(problem, "reduce the load of this machine")
    fault: dict[str, Any] = next(iter(reversed(summary.get("faults") or ())), {})
    meaning, _, hint = str(fault.get("explained") or "").partition("; ")
    last = "; printed last: " + str(fault["output"][-1]).strip() if fault.get("output") else ""
    return Failed(f"{outcome.line or meaning}{last}", hint)


Verdict: TypeAlias = Literal["passed", "failed", "left out", "not reached"]
MORE = 2
"""The steps of a rehearsal after those of the first run."""
TOKENS = 8
"""The number of generated tokens."""
MENDS = {
    "steps": "run the job with --smoke, whose logs stay",
    "kill": "the rank's last lines say what the second attempt met; see the guide on failures",
    "reload": "pin parallel and keep the number of workers, so that the layout never changes",
    "evaluate": "change what evaluate names, or leave it out",
    "export": "set checkpoint.export to null, or to a form that this model has",
    "generate": "leave out evaluate.samples",
}
"""The hint for a stage that fails without one."""


class LeftOut(Exception):
    """The stage does not apply to this job. The message says why."""


@dataclass(frozen=True)
class Stage:
    """The result of a stage: what was done or went wrong, in how many seconds, and what to do about it."""

    name: str
    verdict: Verdict
    done: str
    seconds: float = 0.0
    mend: str = ""


@dataclass
class Rehearsal:
    """The result of a rehearsal.

    `layout` is the plan of the real job, `small` that of the rehearsal. `notes` are the features of the job that the
    small one lacked.
    """

    layout: Layout
    small: Layout | None = None
    stages: list[Stage] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether no stage failed."""
        return all(stage.verdict in ("passed", "left out") for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return the rehearsal as plain data."""
        return {
            "passed": self.passed,
            "seconds": round(sum(stage.seconds for stage in self.stages), 2),
            "layout": str(self.layout),
            "rehearsed_layout": str(self.small) if self.small else None,
            "stages": [asdict(stage) | {"seconds": round(stage.seconds, 2)} for stage in self.stages],
            "notes": list(self.notes),
        }


def rehearse(
    job: ResolvedJob, full_size: FullSizePlan, checked: float, tell: Callable[[Stage | str], None]
) -> Rehearsal:
    """Try a job, whose checks took `checked` seconds, in a temporary folder, and examine it in its full size.

    `tell` gets the name of a stage at its start, and the stage at its end. All files and processes of the
    stages end with them.
    """
    result = Rehearsal(full_size.layout)
    line = f"the job file holds; {full_size.layout} is planned"
    _add(result, Stage("check", "passed", line, checked), tell)
    # The folder and Ray are gone before the trace, because torch ends a process that is signalled during it.
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder, contextlib.ExitStack() as stack:
        scene = Scene(job, full_size, Path(folder), stack, result)
        for name, needs, act in STAGES:
            _go_on(name, needs, act, scene, tell)
            if name == LAST_ON_RAY:
                stack.close()
    _go_on(REAL, (), _full_size, scene, tell)
    return result


def _go_on(
    name: str,
    needs: Sequence[str],
    act: Callable[[Scene], str],
    scene: Scene,
    tell: Callable[[Stage | str], None],
) -> None:
    """Try the next stage, unless a stage that it needs has not passed."""
    tell(name)
    done = {stage.name for stage in scene.result.stages if stage.verdict == "passed"}
    if lacking := [need for need in needs if need not in done]:
        _add(scene.result, Stage(name, "not reached", f"{lacking[0]} did not pass"), tell)
    else:
        _add(scene.result, _tried(name, act, scene), tell)


def _add(rehearsal: Rehearsal, stage: Stage, tell: Callable[[Stage | str], None]) -> None:
    rehearsal.stages.append(stage)
    tell(stage)


def _tried(name: str, act: Callable[[Scene], str], scene: Scene) -> Stage:
    began = time.monotonic()

    def stage(verdict: Verdict, done: str, mend: str = "") -> Stage:
        return Stage(name, verdict, done, time.monotonic() - began, mend)

    try:
        return stage("passed", act(scene))
    except LeftOut as reason:
        return stage("left out", str(reason))
    except InputError as error:
        problem = f"{error.where}: {error.what}" if error.where else error.what
        return stage("failed", " ".join(problem.split()), error.hint or MENDS.get(name, ""))
    except Failed as error:
        return stage("failed", str(error), error.mend or MENDS.get(name, ""))
    except Exception as error:  # whatever the job's own code raises
        return stage("failed", one_line(error), MENDS.get(name, ""))


@dataclass
class Scene:
    """The shared state of a rehearsal's stages.

    The stage data sets `small` and `sets`, the data of sets with their own text; the stage steps sets the run that is
    `watched`. Ray runs as long as `stack` is open.
    """

    job: ResolvedJob
    full_size: FullSizePlan
    folder: Path
    stack: contextlib.ExitStack
    result: Rehearsal
    small: Rehearsed | None = None
    sets: dict[str, str] = field(default_factory=dict)
    watched: WatchedRun | None = None
    shared: str = ""
    """A process of this machine with the ranks' imports, see `imports_begun`."""

    @property
    def steps(self) -> list[int]:
        """Return the steps in the run's rows."""
        return [row["step"] for row in self.run.rows(METRICS)]

    @property
    def run(self) -> RunDir:
        """Return the run directory of the rehearsal."""
        return RunDir(str(self.folder / "run"))

    @property
    def spec(self) -> JobSpec:
        """Return the job of the rehearsal."""
        assert self.small is not None
        return self.small.spec

    @property
    def commit(self) -> CommitManifest:
        """Return the newest checkpoint of the rehearsal."""
        newest = Store(self.run.commits).latest()
        if newest is None:
            raise Failed("there is no sound commit")
        return newest


def _data(scene: Scene) -> str:
    """Make the small job, start Ray, and prepare the data."""
    from cluster.local.ray_session import NotStarted, connected_ray
    from orchestrator.data.progress import StageLine
    from orchestrator.data.store.tokens import Tokens
    from orchestrator.launch.import_prefetch import imports_begun
    from orchestrator.launch.preflight import preflight
    from orchestrator.observe.formatting import count
    from orchestrator.resolve.prepared_data import PreparedData, prepared

    small = rehearsed(scene.job, scene.full_size.layout, scene.folder)
    scene.small = small
    scene.result.small = small.layout
    scene.result.notes = small.notes
    scene.shared = scene.stack.enter_context(
        imports_begun(small.spec.parallel, small.spec.workload.model, embedded=True)
    )
    preflight(small.spec, scene.run, None, None)
    news = scene.stack.enter_context((scene.folder / "ray.log").open("w"))
    worker, world = small.spec.resources.per_worker, small.layout.world
    try:
        ray = connected_ray(None, world * worker.cpu, world * worker.gpu, output=news, packages=PACKAGES)
        scene.stack.enter_context(ray)
    except NotStarted as error:  # the job is not the cause
        raise Failed(error.what, error.hint) from None
    data = prepared(small.spec, scene.run, PreparedData(), StageLine(lambda _: None))
    scene.sets = data.sets
    if small.spec.data.samples is not None:
        return "the job's own samples"
    tokens = Tokens.open(data.uri)
    read = sum(tokens.length(source) for source in range(tokens.sources))
    return f"{count(read)} tokens of the job's own data"


def _steps(scene: Scene) -> str:
    """Train three steps, with a commit after each, in a run whose last rank will be killed after them."""
    from orchestrator.launch.watched_run import attach

    assert scene.small is not None
    last, rank = STEPS - MORE, scene.small.layout.world - 1
    faults = (f"kill@{rank}:{last + 1}/*",)
    scene.watched = attach(scene.spec.document(), scene.run, STEPS - 1, faults, None, shared=scene.shared)
    outcome = follow(scene.watched, lambda: last in scene.steps)
    if outcome is not None and last not in scene.steps:
        raise failure(outcome)
    row = scene.run.rows(METRICS)[last - 1]
    return f"{last} steps and commits under {scene.small.layout}, {_loss(row)}"


def _kill(scene: Scene) -> str:
    """Wait for the kill of a rank, and for the next step after it."""
    assert scene.small is not None
    assert scene.watched is not None
    summary = summary_at_end(scene.watched, STEPS - 1)
    step, rank = STEPS - 1, scene.small.layout.world - 1
    if not summary["faults"]:
        raise Failed(f"rank {rank} was to be killed at step {step}, and no fault is on record")
    return f"rank {rank} was killed at step {step}, and the run continued from its last checkpoint"


def _reload(scene: Scene) -> str:
    """Resume from the checkpoint under another layout."""
    from orchestrator.launch.watched_run import attach
    from orchestrator.resolve.resolved_job import resolve

    assert scene.small is not None
    layout = scene.small.layout
    other = another(layout, demand_of(scene.spec), resolve(scene.spec).shape)
    if other is None:
        raise LeftOut(f"no layout but {layout} is legal for this job on few ranks")
    summary_at_end(
        attach(scene.small.under(other).document(), scene.run, None, (), None, shared=scene.shared), STEPS
    )
    row = scene.run.rows(METRICS)[-1]
    if row["step"] != STEPS or row["layout"] != str(other):
        raise Failed(
            f"step {STEPS} was to be made under {other}, and was {row['step']} under {row['layout']}"
        )
    return f"the commit of {layout} was loaded under {other}, {_loss(row)}"


def _loss(row: Mapping[str, Any]) -> str:
    return "nothing predicted" if row["loss"] is None else f"loss {row['loss']:.4g}"


def _evaluate(scene: Scene) -> str:
    """Evaluate the newest checkpoint on two batches of each set."""
    from orchestrator.config.metric_names import by_name
    from orchestrator.evaluate.of_commit import evaluate_commit

    if not scene.spec.set_names:
        raise LeftOut("the job evaluates nothing")
    row = evaluate_commit(scene.spec, scene.run, scene.commit, scene.sets)
    result = by_name(row["sets"])
    if bad := [name for name, value in result.items() if value != value]:
        raise Failed(f"{bad[0]} is not a number")
    return ", ".join(f"{name} {value:.4g}" for name, value in list(result.items())[:3])


def _export(scene: Scene) -> str:
    """Export the newest checkpoint, and compare its outputs."""
    from orchestrator.export.converted import form_of
    from orchestrator.export.hugging_face import export

    form = scene.job.spec.checkpoint.export
    if form is None:
        raise LeftOut("checkpoint.export is null")
    exported = export(
        scene.run.uri,
        scene.commit.step,
        str(scene.folder / "export"),
        form=form_of(scene.job.spec.checkpoint),
    )
    apart = exported["logits_difference"]
    whose = {"safetensors": "its own", "adapter": "peft's"}.get(form, "transformers'")
    return f"as {form}" + ("" if apart is None else f", logits within {apart:.1e} of {whose}")


def _generate(scene: Scene) -> str:
    """Continue a prompt with the newest checkpoint."""
    from orchestrator.evaluate.samples import continue_prompts
    from orchestrator.resolve.chat import chat_of
    from orchestrator.resolve.commit_model import model_of_commit
    from orchestrator.resolve.prompts import generates

    if scene.job.spec.data.samples is not None or not generates(scene.job):
        raise LeftOut("this model generates no text")
    samples = scene.spec.evaluate and scene.spec.evaluate.samples
    loaded = model_of_commit(scene.run, scene.spec, scene.commit)
    prompt = samples.prompts[0] if samples else "The"
    tokenizer, chat = (
        loaded.tokens.tokenizer(),
        chat_of(loaded.spec.data, loaded.spec.workload.objective, loaded.tokens),
    )
    texts = continue_prompts(
        loaded.workload, loaded.read, tokenizer, [prompt], TOKENS, chat=chat, scheme=loaded.scheme
    )
    return f"{prompt!r} continues with {texts[0]!r}"


def _full_size(scene: Scene) -> str:
    """Trace the job at its own size, on tensors without memory."""
    line, problem, mend = scene.full_size.traced_text(scene.job)
    if problem:
        raise Failed(problem, mend)
    return line


STAGES: Sequence[tuple[str, tuple[str, ...], Callable[[Scene], str]]] = (
    ("data", (), _data),
    ("steps", ("data",), _steps),
    ("kill", ("steps",), _kill),
    ("reload", ("steps",), _reload),
    ("evaluate", ("steps",), _evaluate),
    ("export", ("steps",), _export),
    ("generate", ("steps",), _generate),
)
"""Each stage with the stages that must pass before it."""
LAST_ON_RAY, REAL = "reload", "real size"
