"""Checks, in one process and before a run starts, that an own model can be divided as it declares."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from orchestrator.parallel.config import ParallelChoice
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.own_tensor import apply_own_tensor
from orchestrator.parallel.partition import Cut, cut_of
from workloads.errors import WorkloadError
from workloads.model.generate import evaluating
from workloads.own.declared import stages_of
from workloads.own.generate import is_same_choice, next_logits
from workloads.own.model import OwnWorkload
from workloads.own.network import OwnNetwork, through
from workloads.workload import Batch, Workload

CLOSE = 1e-3
"""Maximum relative difference of losses and gradients that rounding explains."""
SHARDING = "sharding()"
"""The method in which an own model declares how its tensors are cut."""
SECONDS = 60.0
"""How long a rank waits for the others. All compute the same, so a rank that does not arrive has failed."""


def check_stages(workload: OwnWorkload, batch: Batch) -> None:
    """Raise WorkloadError if a module of `stages()` cannot run alone on the output of the one before.

    Args:
        workload: the own model with its `stages()`.
        batch: a few samples.
    """
    count = workload.config.stages
    with torch.no_grad(), torch.device("meta"):
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
        handed: tuple[Tensor, ...] = ()
        for number in range(count):
            model = workload.build()
            assert isinstance(model, OwnNetwork)
            model.keep(number, number + 1)
            try:
                output = model(empty, handed)
            except WorkloadError as error:
                raise WorkloadError(f"{workload.name}: {error}") from None
            except Exception as error:  # whatever the user's code raises
                raise WorkloadError(
                    f"{workload.name}: module {number} of stages() fails without the others ({_line(error)}); let it "
                    "use only its own tensors, its input and the batch"
                ) from None
            handed = output.tensors if number + 1 < count else ()


def check_sharding(
    workload: Workload,
    model: nn.Module,
    batch: Batch,
    ways: int,
    by: str = SHARDING,
    continues: bool = False,
) -> None:
    """Raise WorkloadError if cutting the tensors of `model` over ranks changes its loss or a gradient.

    Args:
        workload, model: the workload and its undivided model.
        batch: the batch to compare on.
        ways: number of ranks, which are threads of this process.
        by: what declares the cuts, for the message.
        continues: whether the ranks also continue texts by the method `logits` of an own model, which must not change
            either.
    """
    where = f"{workload.name}: cut over {ways} ranks by {by}"
    group = _Threads(ways)
    expected = _undivided_result(workload, model, batch)
    styles = workload.sharding()
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    logits: list[Tensor] = []
    failed: list[Exception] = []

    def rank(index: int) -> None:
        try:
            tp = ProcessGroup(tuple(range(ways)), index, cast(Any, _Rank(group, index)))
            part, cuts = _part(model, styles, tp)
            loss = workload.loss(part, batch).total
            loss.backward()
            gradients = {n: p.grad for n, p in part.named_parameters() if p.grad is not None}
            results.append(
                (loss.detach(), {n: _placed(grad, cuts[n], index) for n, grad in gradients.items()})
            )
            if continues:
                logits.append(_logits(workload.name, part, batch))
        except Exception as error:  # whatever the user's code raises
            failed.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(ways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        first = next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
        raise WorkloadError(f"{where}, its loss fails ({_line(first)})")
    added = {
        key: sum((parts[key] for _, parts in results if key in parts), torch.zeros_like(gradient))
        for key, gradient in expected[1].items()
    }
    hints = ("", "")
    if by == SHARDING:
        hints = (
            "; split a layer that returns several things side by side (query, key and value) into several layers",
            "; if its module reads the output of a column-cut layer, give it the style shared",
        )
    _check_same(where, expected, [loss for loss, _ in results], added, hints)
    if continues:
        _check_logits(where, workload.name, _logits(workload.name, model, batch), logits)


def _logits(name: str, model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of an own model for the first sample, [1, L, vocabulary], in evaluation mode."""
    assert isinstance(model, OwnNetwork)
    with torch.no_grad(), evaluating(model):
        return next_logits(name, model.network, batch["tokens"][:1])


def _check_logits(where: str, name: str, expected: Tensor, parts: Sequence[Tensor]) -> None:
    """Raise WorkloadError if the logits of a rank are not those of the undivided model."""
    for part in parts:
        if part.shape != expected.shape:
            problem = f"its logits have {part.shape[-1]} columns, and {expected.shape[-1]} whole"
            hint = "compute them by an nn.Linear with the style vocabulary"
            raise WorkloadError(f"{where}, {problem}; {hint}")
        if not is_same_choice(name, expected, part):
            raise WorkloadError(f"{where}, its logits differ; compute them by the layers that the loss uses")


def check_layers(workload: Workload, model: nn.Module, batch: Batch) -> None:
    """Raise WorkloadError if cutting `model`, a class of transformers, into one-layer stages changes its loss or a
    gradient.

    Args:
        workload: the class of transformers.
        model: its undivided module.
        batch: a few samples.
    """
    where = f"{workload.name}: cut between its layers"
    expected = _undivided_result(workload, model, batch)
    try:
        loss, gradients = _by_layers(workload, model, batch)
    except Exception as error:  # classes of transformers raise any kind of error
        raise WorkloadError(f"{where}, its loss fails ({_line(error)})") from None
    _check_same(where, expected, [loss], gradients)


def _undivided_result(workload: Workload, model: nn.Module, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of the undivided model. Its own gradients are cleared, because it is copied."""
    model.zero_grad(set_to_none=True)
    loss = workload.loss(model, batch).total
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients


def _check_same(
    where: str,
    expected: tuple[float, dict[str, Tensor]],
    losses: Sequence[Tensor],
    summed: Mapping[str, Tensor],
    hints: tuple[str, str] = ("", ""),
) -> None:
    """Raise WorkloadError if a loss or a gradient differs from that of the undivided model.

    Args:
        where: beginning of the message.
        expected: loss and gradients of the undivided model.
        losses: losses of the ranks.
        summed: gradients, summed over the ranks.
        hints: ends of the message for a loss and for a gradient.
    """
    total, gradients = expected
    for loss in losses:
        if not abs(float(loss) - total) <= CLOSE * abs(total) + 1e-6:
            raise WorkloadError(f"{where}, its loss is {float(loss):.6g}, and {total:.6g} whole{hints[0]}")
    # A gradient that is near zero consists of rounding errors, so the largest norm bounds the absolute error.
    largest = max((float(g.norm()) for g in gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        other = summed.get(name, torch.zeros_like(gradient))
        if not float((other - gradient).norm()) <= CLOSE * float(gradient.norm()) + 1e-5 * largest:
            raise WorkloadError(f"{where}, the gradient of {name} differs{hints[1]}")


def _by_layers(workload: Workload, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and all gradients, computed by stages of one layer each, one after another."""
    count = len(workload.stages()) + 1
    stages = [copy.deepcopy(model) for _ in range(count)]
    handed: tuple[Tensor, ...] = ()
    sent: list[tuple[Tensor, Tensor]] = []
    for number, stage in enumerate(stages[:-1]):
        stage.keep(number, number + 1)  # type: ignore[operator]
        (hidden,) = stage(batch, handed=handed).tensors
        # Cut the graph between stages, as sending between ranks does.
        handed = (hidden.detach().requires_grad_(),)
        sent.append((hidden, handed[0]))
    stages[-1].keep(count - 1, count)  # type: ignore[operator]
    loss = workload.criterion(stages[-1](batch, handed=handed), batch).total
    loss.backward()
    for hidden, received in reversed(sent):
        hidden.backward(received.grad)
    result: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                result[name] = result.get(name, torch.zeros_like(parameter)) + parameter.grad
    return loss.detach(), result


def check_divided(
    parallel: ParallelChoice,
    workload: Any,
    make: Callable[[], nn.Module],
    batch: Batch,
    continues: bool = False,
) -> None:
    """Raise WorkloadError if ranks that divide a model compute something else than one rank.

    Args:
        parallel: how the job divides the model.
        workload: the model, small enough to be tried. This project's own layers need no such check.
        make: returns its module, with weights that all affect the loss.
        batch: a few samples.
        continues: whether the ranks continue texts.
    """
    if workload.config.divided_by == "plan":
        _check_plan(parallel, workload, make, batch)
    elif workload.config.divided_by == "declaration":
        _check_declaration(parallel, workload, make, batch, continues)


def _check_plan(parallel: ParallelChoice, trial: Any, make: Callable[[], nn.Module], batch: Batch) -> None:
    """Check a small copy of a transformers class, if the job divides the class."""
    if parallel == "auto":
        return
    try:
        halves = all(n % 2 == 0 for n in (*trial.config.head_counts, trial.config.cut))
        if parallel.tp > 1 and trial.sharding():
            if not halves:
                raise WorkloadError(
                    f"{trial.name}: no small copy of it can be divided over 2 ranks for a trial"
                )
            check_sharding(trial, make(), batch, 2, "the plan of transformers")
        if parallel.pp > 1 and trial.stages():
            check_layers(trial, make(), batch)
    except WorkloadError as error:
        raise WorkloadError(f"{error}; set parallel to auto") from None


def _check_declaration(
    parallel: ParallelChoice,
    workload: OwnWorkload,
    make: Callable[[], nn.Module],
    batch: Batch,
    continues: bool,
) -> None:
    """Check that an own model's declared stages and sharding are correct."""
    tp = 1 if parallel == "auto" else parallel.tp
    fits = workload.config.cut % tp == workload.config.whole_heads % tp == 0
    ways = {min_cut(workload), tp if fits else 1} - {1}
    if not ways and not workload.config.stages:
        return
    model = make()
    if workload.config.stages:
        check_stages(workload, batch)
        check_stage_outputs(workload, model, batch)
    # A job without tensor parallelism may have logits that no cut supports.
    says = continues and workload.config.gives_logits and "tokens" in batch
    is_cut = parallel == "auto" or parallel.tp > 1
    for count in sorted(ways):
        check_sharding(workload, model, batch, count, continues=says and is_cut)


def min_cut(workload: OwnWorkload) -> int:
    """Return the smallest number of ranks above one over which this model's tensors may be cut; 1 if none are cut."""
    config = workload.config
    if not config.is_sharded:
        return 1
    heads, cut = config.whole_heads, config.cut
    if cut == 1:  # only tables are cut, and their parts may be unequal
        return 2
    return next((n for n in range(2, cut + 1) if cut % n == heads % n == 0), 1)


def check_stage_outputs(workload: OwnWorkload, model: nn.Module, batch: Batch) -> None:
    """Raise WorkloadError if the stages of a model do not compute the same loss as its own `loss`.

    Raises it also if the output of the first stage has no gradient.

    Args:
        workload: the own model with its `stages()`.
        model: its undivided module.
        batch: a few samples.
    """
    assert isinstance(model, OwnNetwork)
    stages = stages_of(model.network)
    if not all(tensor.requires_grad for tensor in through(stages, batch, 0, 1)):
        raise WorkloadError(
            f"{workload.name}: the first module of stages() returns values that depend on no parameter; let the "
            "other modules read those from the batch"
        )
    own_loss: Callable[[Batch], Any] | None = getattr(model.network, "loss", None)
    if not callable(own_loss):
        return
    result = own_loss(batch)
    losses = result[0] if isinstance(result, tuple) else result
    theirs = model(batch).losses
    if losses.shape != theirs.shape or not torch.allclose(losses, theirs, rtol=CLOSE, atol=1e-5):
        raise WorkloadError(
            f"{workload.name}: stages() gives another loss than loss(batch); take out one of the two"
        )


def _part(
    full_model: nn.Module, styles: Mapping[str, str], tp: ProcessGroup
) -> tuple[nn.Module, dict[str, Cut]]:
    """Return a rank's part of the model, and where each of its tensors is in the whole."""
    model = copy.deepcopy(full_model)
    mesh = cast(Mesh, SimpleNamespace(tp=tp, layout=SimpleNamespace(sequence=False)))
    cuts = {n: cut_of(n, p.shape, styles, mesh) for n, p in model.named_parameters()}
    parts = {
        p: nn.Parameter(p.detach()[cuts[n].slices()].clone(), p.requires_grad)
        for n, p in model.named_parameters()
    }
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = parts[parameter]
    apply_own_tensor(model, styles, tp)
    return model, cuts


def _placed(gradient: Tensor, cut: Cut, index: int) -> Tensor:
    """Return a rank's contribution to the full gradient. The contributions of all ranks add up to it."""
    full = gradient.new_zeros(cut.shape)
    if cut.over_tp or cut.partial or index == 0:
        full[cut.slices()] = gradient
    return full


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class _Threads:
    """Collectives of ranks that are threads of this process."""

    def __init__(self, ways: int) -> None:
        self.ways, self.barrier = ways, threading.Barrier(ways, timeout=SECONDS)
        self.tensors: list[Tensor | None] = [None] * ways

    def everyone(self, index: int, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""
        self.tensors[index] = mine.detach().clone()
        self.barrier.wait()
        result = [cast(Tensor, tensor) for tensor in self.tensors]
        self.barrier.wait()
        return result


class _Rank:
    """Stands in for the process group of a rank that is a thread, see `torch.distributed.ProcessGroup`."""

    def __init__(self, threads: _Threads, index: int) -> None:
        self._threads, self._index = threads, index

    def allreduce(self, tensors: list[Tensor], _: object) -> None:
        """Sum in place over all ranks."""
        tensors[0].copy_(torch.stack(self._threads.everyone(self._index, tensors[0])).sum(0))

    def all_gather_single(self, out: Tensor, mine: Tensor, _: object) -> None:
        """Write the parts of all ranks to `out` in rank order."""
        out.copy_(torch.cat(self._threads.everyone(self._index, mine)).view_as(out))
