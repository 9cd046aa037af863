"""The trace of one rank: build its engine on tensors without memory, run a warm-up step, and record the next ones."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Sequence

from orchestrator.checkpoint.shared_memory import room_for
from orchestrator.config.errors import InputError
from orchestrator.data.config import DataSpec
from orchestrator.parallel.arithmetic import HEAD_TOKENS
from orchestrator.parallel.device import COMPUTE, Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.offload import Offload
from orchestrator.planner.step_trace import CATEGORIES, Memory, NotTraced, StepTrace
from orchestrator.planner.trace.fake_values import assumed_values
from orchestrator.planner.trace.isolation import TooLong, cpu_time_limit, fake_ranks, fixed_collections
from orchestrator.planner.trace.recorded_steps import RecordedSteps
from orchestrator.planner.trace.recorder import Recorder
from orchestrator.planner.trace.recording import CPU, recording
from orchestrator.planner.trace.sample_batch import sample_batch
from orchestrator.train.engines.config import EngineConfig
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.errors import WorkloadError
from workloads.workload import Batch, Workload


def traces(
    config: EngineConfig,
    workload: Workload,
    layout: Layout,
    rank: int,
    counts: Sequence[int],
    seconds: float = math.inf,
    *,
    data: DataSpec,
    draws: bool,
) -> list[StepTrace] | NotTraced:
    """Trace steps of `rank` under `layout`: its operators and messages in order, and the memory that it holds.

    Args:
        config: how the engine computes a step.
        workload: the model and its objective; its weights are not read.
        layout: how the ranks divide the work.
        rank: the rank to trace.
        counts: numbers of micro-batches, ascending; one step is recorded for each.
        seconds: limit on the CPU time of the trace.
        data: what a sample is made of.
        draws: whether rows need keys for random numbers, see `WorkloadSpec.draws`.

    Returns:
        One trace for each of `counts`, or the reason why there is none.

    Raises:
        RuntimeError: if this process is in a process group.
    """
    if layout.engine != "torch":
        return NotTraced(rank, "a trace cannot follow DeepSpeed's own memory")
    if config.train.compile:
        return NotTraced(rank, "compiled blocks are not traced: their kernels choose what they keep")
    try:
        batch = sample_batch(data, config.seed, draws, workload, layout.micro_batch)
    except (InputError, WorkloadError) as error:
        return NotTraced(rank, str(error))
    # Statistics by layer are read as numbers, which a trace has none of, and most steps collect none.
    config = dataclasses.replace(config, train=config.train.model_copy(update={"layer_statistics": None}))
    assumptions: list[str] = []

    def note(line: str) -> None:
        if line not in assumptions:
            assumptions.append(line)

    on_cpu = not config.gpus
    fake, recorder, messages = recording(batch, on_cpu)
    try:
        with (
            fake_ranks(rank, layout.world) as group,
            assumed_values(note, on_cpu),
            fixed_collections(),
            cpu_time_limit(time.process_time() + seconds),
            warnings.catch_warnings(action="ignore"),  # they concern a run, not a plan
        ):
            with fake, recorder:
                shapes: Batch = {name: fake.from_tensor(t) for name, t in batch.items()}
                engine = TorchEngine(
                    config, workload, layout, Device(CPU, COMPUTE[config.train.dtype], group)
                )
                if not on_cpu:
                    engine.passes.losses._tokens_at_once = HEAD_TOKENS["cuda"]
                messages.mesh = engine.mesh
                recorder.updates_on_host = not on_cpu and isinstance(engine.parallel.data, Offload)
                steps = RecordedSteps(engine, shapes, config.train.optimizer.lr, recorder, messages)
                recorded = [
                    _step_trace(rank, layout, recorder)
                    for _ in steps.record(warm_up(layout, counts[0]), counts)
                ]
                saved = room_for(engine.state())[0]
    except Exception as error:
        if isinstance(error, TooLong) or isinstance(error.__cause__ or error.__context__, TooLong):
            return NotTraced(rank, "the trace of its step exceeded the time limit")
        return NotTraced(rank, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    size = sum(tensor.nbytes for tensor in batch.values())
    return [
        dataclasses.replace(trace, assumptions=tuple(assumptions), saved=saved, batch_bytes=size)
        for trace in recorded
    ]


def warm_up(layout: Layout, max_micro_batches: int) -> int:
    """Return the micro-batches of the warm-up step, which creates the optimizer state and all buffers.

    One suffices, except that torch's 1F1B requires at least one per stage.

    Args:
        layout: the layout.
        max_micro_batches: of the recorded steps.
    """
    return min(layout.pp if layout.schedule == "1f1b" else 1, max_micro_batches)


def _step_trace(rank: int, layout: Layout, recorder: Recorder) -> StepTrace:
    """Return the trace of the step that was recorded last."""
    (phase, stage, micro_batch), peak, parts = recorder.peak
    at_peak = dict(zip(CATEGORIES, parts, strict=True))
    memory = Memory(peak, at_peak, steady=recorder.steady, phase=phase, stage=stage, micro_batch=micro_batch)
    return StepTrace(
        rank,
        layout.to_json(),
        tuple(recorder.events or ()),
        memory,
        operator_peaks=tuple(recorder.operator_peaks),
    )
