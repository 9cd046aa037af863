"""Rank programs of `bench_parallel.py`: each measures one thing on every rank and returns it."""

from __future__ import annotations

import gc
import json
import statistics
import time
import weakref
from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.device import Device, close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine
from orchestrator.train.flight_record import records
from workloads.load import load
from workloads.workload import Batch, Vocabulary, Workload


def job(config: dict[str, Any]) -> JobSpec:
    """The job of a measurement; `config` says the model's sizes, the batch and the sequence."""
    return parse({
        "name": "bench",
        "workload": {"model": config.get("model", "llama-tiny"), "changes": config["changes"]},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": config["length"]},
        "train": {
            "steps": 1000, "global_batch": config["batch"],
            "optimizer": {"name": config.get("optimizer", "adamw")},
        },
    })  # fmt: skip


def workload_of(spec: JobSpec, vocabulary: int) -> Workload:
    """The model over a made-up vocabulary."""
    words = Vocabulary(vocabulary, eos=0)
    return load(
        spec.workload.model, "causal_lm", words,
        changes=spec.workload.changes, sequence_length=spec.data.sequence_length,
    )  # fmt: skip


def batches(spec: JobSpec, layout: Layout, vocabulary: int) -> list[Batch]:
    """Random micro-batches of one step of this rank."""
    random = torch.Generator().manual_seed(layout.coordinate(dist.get_rank())["dp"])
    count = layout.accumulation(spec.train.global_batch)
    shape = (layout.micro_batch, spec.data.sequence_length)
    ids = [torch.randint(1, vocabulary, shape, generator=random) for _ in range(count)]
    return [{"tokens": one, "labels": one} for one in ids]


def started(config: dict[str, Any], context: WorkerContext) -> tuple[JobSpec, Workload, Device]:
    """What every measurement begins with."""
    spec = job(config)
    return (
        spec,
        workload_of(spec, config["vocabulary"]),
        open_device(spec.train, spec.resources.per_worker, context),
    )


def pipeline(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Processor seconds of each stage's forward, backward, and halves of the backward pass, and the schedule.

    Processor time of the thread, not wall time: ranks share cores here, and a stage that waits is not busy.
    """
    spec, workload, device = started(config, context)
    found: dict[str, Any] = {}
    for name, fields in config["layouts"].items():
        layout = Layout(**fields)
        engine = TorchEngine(spec.engine, workload, layout, device)
        engine.initialise(0)
        with _Stopwatch() as watch:
            for step in range(config["steps"]):
                engine.train_step(batches(spec, layout, config["vocabulary"]), 1e-4)
                if step == 0:
                    watch.seconds.clear()
                if step + 1 < config["steps"]:
                    watch.calls.clear()
        busy = {key: statistics.median(values) for key, values in watch.seconds.items()}
        found[name] = {"busy": busy, "calls": watch.calls}
        engine.close()
    close_device()
    return found


def groups(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """The groups that this rank has made, and the collectives that training and evaluation ran in each.

    torch's flight recorder counts them. Axes share a group if their ranks are the same.
    """
    spec, workload, device = started(config, context)
    layout = Layout(**config["layout"])
    engine = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(0)
    for _ in range(config["steps"]):
        engine.train_step(batches(spec, layout, config["vocabulary"]), 1e-4)
    engine.eval_step(batches(spec, layout, config["vocabulary"]))
    calls = Counter(
        str(entry["process_group"][0])
        for _, record in records()
        for entry in json.loads(record).get("entries") or ()
    )
    axes: dict[str, list[str]] = defaultdict(list)
    for axis in GROUPS:
        handle = getattr(engine.mesh, axis).handle
        if handle is not None:
            axes[str(handle.group_name)].append(axis)
    made = [str(group.group_name) for group in distributed_c10d._world.pg_map]
    engine.close()
    close_device()
    return {
        "groups": {" = ".join(names): calls[group] for group, names in axes.items()},
        "others": sorted(calls[group] for group in made if group not in axes),
    }


GROUPS = ("world", "tp", "cp", "pp", "data", "expert", "expert_data", "shard", "copies", "expert_shard")
"""The groups of a mesh by name."""


METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


class _Stopwatch:
    """Processor seconds of every call of a stage, under "<stage><F, B, I or W>", and the calls in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.calls: list[tuple[int, str, int]] = []
        self._plain = {name: getattr(_PipelineStageBase, name) for name in METHODS}

    def __enter__(self) -> _Stopwatch:
        for name, letter in METHODS.items():
            setattr(_PipelineStageBase, name, self._timed(self._plain[name], letter))
        return self

    def __exit__(self, *_: object) -> None:
        for name, plain in self._plain.items():
            setattr(_PipelineStageBase, name, plain)

    def _timed(self, plain: Any, letter: str) -> Any:
        def run(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            kind = "I" if letter == "B" and not kwargs.get("full_backward", True) else letter
            began = time.thread_time()
            result = plain(stage, number, *args, **kwargs)
            self.seconds[f"{stage.stage_index}{kind}"].append(time.thread_time() - began)
            self.calls.append((stage.stage_index, kind, number))
            return result

        return run


def states(config: dict[str, Any], context: WorkerContext) -> dict[str, float]:
    """Bytes of all tensors that live between steps (weights, gradients, optimiser states), and at a step's peak."""
    spec, workload, device = started(config, context)
    layout = Layout(**config["layout"])
    engine = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(0)
    data = batches(spec, layout, config["vocabulary"])
    for _ in range(config["steps"]):
        engine.train_step(data, 1e-4)
    gc.collect()
    with Peak() as peak:
        held = peak.bytes
        engine.train_step(data, 1e-4)
    close_device()
    return {"held": held, "peak": peak.bytes, "parameters": sum(s.numel() for s in workload.shapes.values())}


class Peak(TorchDispatchMode):
    """The most bytes of tensors that live at once, looked at after every operator.

    What exists at the start is found among all objects; what operators return is followed until it dies. FSDP2 frees
    storages by resizing them, so sizes are asked for anew each time. What kernels and gloo allocate within an
    operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and type(t) is not DTensor]
        found += [t.grad for t in found if t.grad is not None]
        for tensor in found:
            self._follow(tensor)
        self.bytes = self._now()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor)
        self.bytes = max(self.bytes, self._now())
        return out

    def _follow(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not DTensor and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = weakref.ref(storage)

    def _now(self) -> int:
        sizes = {key: storage.nbytes() for key, ref in self._alive.items() if (storage := ref()) is not None}
        self._alive = {key: self._alive[key] for key in sizes}
        return sum(sizes.values())


class Traffic(TorchDispatchMode):
    """Bytes that this rank sends in collectives, as rings would move them (n - 1 of n parts for each half)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if func.namespace == "c10d":
            self.bytes += self._sent(name.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
        ways = dist.ProcessGroup.unbox(group).size() if group is not None else dist.get_world_size()
        largest = max((t.numel() * t.element_size() for t in tensors), default=0)
        part = (ways - 1) / ways * largest
        if name.startswith("allreduce"):
            return 2 * part
        if name.startswith(("allgather", "_allgather", "reduce_scatter", "_reduce_scatter", "alltoall")):
            return part
        return float(largest) if name == "send" else 0.0


def traffic(config: dict[str, Any], context: WorkerContext) -> dict[str, float]:
    """Bytes that this rank sends in one step, for each layout."""
    spec, workload, device = started(config, context)
    found = {}
    for name, fields in config["layouts"].items():
        layout = Layout(**fields)
        engine = TorchEngine(spec.engine, workload, layout, device)
        engine.initialise(0)
        data = batches(spec, layout, config["vocabulary"])
        engine.train_step(data, 1e-4)
        with Traffic() as counted:
            engine.train_step(data, 1e-4)
        found[name] = counted.bytes
        engine.close()
    close_device()
    return {**found, "parameters": sum(s.numel() for s in workload.shapes.values())}


def peers(config: dict[str, Any], context: WorkerContext) -> dict[str, list[float]]:
    """Seconds of steps of our engine and of plain loops with DDP and FSDP2, in turns."""
    spec, workload, device = started(config, context)
    layout = Layout(
        dp=context.rank_info.world_size, micro_batch=config["batch"] // context.rank_info.world_size
    )
    data = batches(spec, layout, config["vocabulary"])
    runs = {
        "ours, zero 0": _ours(spec, workload, layout, device, data),
        "DDP": _plain(workload, data, DistributedDataParallel),
        "ours, zero 3": _ours(spec, workload, Layout(**{**layout.to_json(), "zero": 3}), device, data),
        "FSDP2": _plain(workload, data, _fsdp),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(config["rounds"]):
        order = list(runs.items()) if number % 2 else list(reversed(runs.items()))
        for name, step in order:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(config["steps"]):
                step()
            dist.barrier()
            if number:
                found[name].append((time.perf_counter() - began) / config["steps"])
    close_device()
    return found


def _ours(spec: JobSpec, workload: Workload, layout: Layout, device: Device, data: list[Batch]) -> Any:
    engine = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(0)
    return lambda: engine.train_step(data, 1e-4)


def _fsdp(model: nn.Module) -> nn.Module:
    for layer in model.layers.values():  # type: ignore[operator, union-attr]
        fully_shard(layer)
    return fully_shard(model)


def _plain(workload: Workload, data: list[Batch], wrap: Any) -> Any:
    """What a user writes by hand: forward, backward, clip, AdamW."""
    model = workload.build()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(workload.initial(name, 0))
    model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for batch in data:
            loss = workload.loss(model, batch)
            (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
