"""Check on a few samples that an own model trains the same way under every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.model.generate import evaluating
from workloads.own.generate import is_same_choice, next_logits
from workloads.own.model import NETWORK, OwnWorkload
from workloads.own.network import OwnNetwork
from workloads.workload import Batch

CLOSE = 1e-3
"""The largest relative difference, by rounding, between the loss of two samples together and one by one."""
TAKEN = frozenset(
    {
        *(
            "step",
            "loss",
            "lr",
            "grad_norm",
            "tokens",
            "tokens_per_second",
            "step_seconds",
            "data_seconds",
            "time",
        ),
        *(
            "commit_seconds",
            "samples",
            "layout",
            "attempt",
            "memory_bytes",
            "busy_seconds",
            "evaluation_seconds",
        ),
        *(
            "evaluations",
            "saves",
            "padding",
            "sequence_length",
            "perplexity",
            "bits_per_byte",
            "count",
            "correct",
        ),
        *("loss_scale", "skipped"),
    }
)
"""Names that rows of training and evaluation already use."""


SHAKEN = 0.05
"""The standard deviation of the noise that is added to weights before a check. Behind a weight that starts at zero,
neither gradients nor dropout nor wrong sharding would be visible.
"""


def check_trained(workload: OwnWorkload) -> None:
    """Raise WorkloadError if the model freezes a parameter that the run would train."""
    frozen = (name for name, p in workload.config.bare.named_parameters() if not p.requires_grad)
    if left := [name for name in frozen if f"{NETWORK}{name}" not in workload.frozen]:
        raise WorkloadError(
            f"{workload.name} sets requires_grad of {left[0]} to False, but only train.freeze excludes "
            f"parameters from training; "
            f"add {NETWORK}{left[0]} to train.freeze, which takes patterns"
        )


def check_model(
    workload: OwnWorkload, batch: Batch, seed: int, limits: Mapping[str, int] | None = None
) -> set[str]:
    """Check that the user's model trains as this project needs it.

    Args:
        workload: the model and its objective.
        batch: the first samples, at least two.
        seed: the seed of the initial weights.
        limits: exclusive upper bounds of the samples' integers, see `Samples.limits`.

    Returns:
        The names of the other values that the loss function returns.

    Raises:
        WorkloadError: the model cannot be made from a seed, rejects the samples, has no loss with gradients on `batch`,
            draws random numbers itself, has a sample loss that depends on other samples, or does not call a layer as a
            module.
    """
    name = workload.name
    first = model_of(workload, seed)
    ours, theirs = ({**m.state_dict(), **dict(m.named_buffers())} for m in (first, model_of(workload, seed)))
    if any(not torch.equal(ours[key], theirs[key]) for key in ours):
        raise WorkloadError(
            f"{name} has different initial weights each time; draw them with torch's random generator only"
        )
    if callable(check := getattr(first.network, "check", None)):
        try:
            check(batch, limits or {})
        except ValueError as error:
            raise WorkloadError(f"{name}: {error}") from None
    del first, ours, theirs
    model = shaken(workload, batch, seed)
    loss, metrics = _run(workload, model, batch, 1)
    again, _ = _run(workload, model, batch, 2)
    if not loss.isfinite():
        raise WorkloadError(f"{name}: its loss on the first samples is {loss.item()}; fix it")
    if not torch.equal(loss, again):
        raise WorkloadError(
            f"{name} draws random numbers in its loss, so the loss depends on the layout; take out dropout, and draw "
            "random numbers in the samples"
        )
    if taken := sorted(TAKEN & metrics):
        raise WorkloadError(
            f"{name}: {taken[0]} is already a column of metrics rows; give the value another name"
        )
    if not loss.requires_grad:
        raise WorkloadError(f"{name}: its loss has no gradient; compute the loss from the parameters")
    _gradients(name, model, loss)
    check_blocks(workload, model, batch)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    size = len(next(iter(batch.values())))
    if workload.compares:
        _check_comparing(workload, model, batch)
        return metrics
    apart = [_run(workload, model, {k: v[i : i + 1] for k, v in batch.items()}, 1)[0] for i in range(size)]
    _check_reach(name, model, apart)
    if changed := [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]:
        raise WorkloadError(f"{name}: its forward pass changes {changed[0]}; make what is learnt a parameter")
    total = sum(sample_loss.item() for sample_loss in apart)
    if not abs(total - loss.item()) <= CLOSE * max(abs(total), abs(loss.item()), 1e-6):
        raise WorkloadError(
            f"{name}: the loss of {size} samples is {loss.item():.6g} together and {total:.6g} one by one, so that it "
            "depends on the layout; use layers that look at one sample (group or layer normalisation)"
        )
    return metrics


def _check_reach(name: str, model: nn.Module, losses: Sequence[Tensor]) -> None:
    """Raise WorkloadError if one sample's loss reaches a parameter that another's does not.

    ZeRO 2 and 3 reduce the existing gradients in order, so different sets of gradients would mix up the parameters.
    """
    times: Counter[str] = Counter()
    for loss in losses:
        times.update(_gradients(name, model, loss))
    if some := [key for key, count in times.items() if 0 < count < len(losses)]:
        raise WorkloadError(
            f"{name}: {some[0]} gets a gradient from one sample and none from another, so ranks would sum gradients of "
            "different parameters; use all parameters for each sample, multiplied by 0 where they have no effect"
        )


def _gradients(name: str, model: nn.Module, loss: Tensor) -> list[str]:
    """Return the parameters in which a loss has a gradient. Raises WorkloadError if the backward pass fails.

    Nested checkpointing fails here: pipeline schedules and ZeRO request gradients for single parameters.
    """
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except Exception as error:  # whatever the user's code raises
        why = f"its backward pass failed on the first samples ({_line(error)}); fix it"
        if "use_reentrant" in str(error):
            why = (
                "its checkpoints are reentrant, which have no gradients by parameter; give torch.utils.checkpoint "
                "use_reentrant=False, or name the layers in blocks() and let parallel.recompute do it"
            )
        raise WorkloadError(f"{name}: {why}") from None
    return [key for key, gradient in zip(trained, gradients, strict=True) if gradient is not None]


def check_blocks(workload: OwnWorkload, model: nn.Module, batch: Batch) -> None:
    """Check that no code reads the parameters of a layer outside the layer's call.

    Under ZeRO 3 these parameters are gathered only for the call.

    Args:
        workload: the model and its objective.
        model: the module.
        batch: the first samples.

    Raises:
        WorkloadError: the parameters of a layer of `blocks()` are read outside its call.
    """
    blocks = workload.blocks(model)
    if not blocks or _is_whole_without(blocks, workload, model, batch):
        return
    number = next(
        (n for n, block in enumerate(blocks) if not _is_whole_without([block], workload, model, batch)), 0
    )
    raise WorkloadError(
        f"{workload.name}: parameters of layer {number} of blocks() are read outside its call, where ZeRO 3 has only "
        "parts of them; call the layer as a module, and let no other module read its parameters"
    )


def _is_whole_without(
    blocks: Sequence[nn.Module], workload: OwnWorkload, model: nn.Module, batch: Batch
) -> bool:
    """Return whether the loss can be computed if the parameters of these layers exist only during the layers' calls."""
    hooks, every = [], []
    for block in blocks:
        parameters = [
            (module, leaf, parameter)
            for module in block.modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None
        ]
        away = {p: p.detach().new_full((), torch.nan).expand_as(p) for *_, p in parameters}
        hooks.append(block.register_forward_pre_hook(_with(parameters, {})))
        hooks.append(block.register_forward_hook(_with(parameters, away), always_call=True))
        _with(parameters, away)()
        every += parameters
    try:
        with torch.no_grad():
            return bool(_run(workload, model, batch, 1)[0].isfinite())
    except WorkloadError:
        return False
    finally:
        for hook in hooks:
            hook.remove()
        _with(every, {})()


def _with(
    parameters: list[tuple[nn.Module, str, nn.Parameter]], away: Mapping[nn.Parameter, Tensor]
) -> Callable[..., None]:
    """Return a hook that replaces each parameter by its stand-in."""

    def put(*_: object) -> None:
        for module, leaf, parameter in parameters:
            module._parameters[leaf] = away.get(parameter, parameter)  # type: ignore[assignment]

    return put


def _check_comparing(workload: OwnWorkload, model: nn.Module, batch: Batch) -> None:
    """Check that a sample's features do not depend on other samples. Only the comparison may."""
    with torch.no_grad():
        together = model(batch).losses
        size = len(together)
        alone = torch.cat([model({k: v[i : i + 1] for k, v in batch.items()}).losses for i in range(size)])
    if not torch.allclose(together, alone, rtol=CLOSE, atol=CLOSE * float(together.abs().max())):
        raise WorkloadError(
            f"{workload.name}: the features of a sample depend on the others in its batch, and so on the layout; use "
            "layers that look at one sample (group or layer normalisation)"
        )


def model_of(workload: OwnWorkload, seed: int) -> nn.Module:
    """Return the model with its initial weights, in training mode.

    Args:
        workload: the model and its objective.
        seed: the seed of the initial weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return workload.build().train()


def shaken(workload: OwnWorkload, batch: Batch, seed: int) -> nn.Module:
    """Return the model with noise added to its weights, so that all parts affect the loss.

    If the loss is not finite with these weights, return the model with its initial weights.

    Args:
        workload: the model and its objective.
        batch: the first samples.
        seed: the seed of the weights and of the noise.
    """
    model = model_of(workload, seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(SHAKEN * torch.randn(parameter.shape, generator=draws).to(parameter.dtype))
    loss, _ = _run(workload, model, batch, 1)
    return model if loss.isfinite() else model_of(workload, seed)


def _run(workload: OwnWorkload, model: nn.Module, batch: Batch, seed: int) -> tuple[Tensor, set[str]]:
    """Return the sum of the losses, and the names of the other values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            loss = workload.loss(model, batch)
        except WorkloadError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise WorkloadError(
                f"{workload.name}: its loss failed on the first samples ({_line(error)}); fix it"
            ) from None
    return loss.total, set(loss.sums)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def check_logits(name: str, model: nn.Module, batch: Batch, any_length: bool) -> None:
    """Check that the model's logits of a token follow from the tokens up to it.

    Texts of one batch are padded at their ends while the model continues them, so later tokens must change nothing.

    Args:
        name: the model's name in messages.
        model: the module.
        batch: text samples.
        any_length: whether the model must also take shorter texts, which tasks have; samples may keep the batch's
            length.

    Raises:
        WorkloadError: later tokens change the logits, or the model does not take shorter texts.
    """
    assert isinstance(model, OwnNetwork)
    if "tokens" not in batch:
        raise WorkloadError(f"{name} reads no text, so it cannot continue any")
    tokens = batch["tokens"][:1]
    read = max(tokens.shape[1] // 2, 1)
    other = tokens.clone()
    other[:, read:] = (other[:, read:] + 1) % max(int(tokens.max()) + 1, 2)
    with torch.no_grad(), evaluating(model):
        full = next_logits(name, model.network, tokens)[:, :read]
        same = is_same_choice(name, full, next_logits(name, model.network, other)[:, :read])
        try:
            part = next_logits(name, model.network, tokens[:, :read])
        except WorkloadError:  # it may take only multiples of a number
            if any_length:
                raise
            part = full
    if not (same and is_same_choice(name, full, part)):
        raise WorkloadError(
            f"{name}: the logits of a token depend on later tokens, so they cannot continue a text; let each token see "
            "those before it alone"
        )
