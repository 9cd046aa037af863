"""Check that an unchanged Hugging Face class computes what the objective expects, on a small copy of the class.

Classes interpret their masks on their own, so the checks change tokens and observe which logits change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workloads.adapters.adapter import B
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import auto_class, describe_hf_class
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check.made_up_rows import samples_of
from workloads.hf.check.small_copy import fewer_tokens, narrowings
from workloads.hf.check.visibility import (
    LENGTH,
    check_documents,
    check_visibility,
    check_windows,
    differ,
    logits_of,
    row_of,
)
from workloads.hf.files.hf_config import nested_configs, root
from workloads.hf.files.weight_names import has_weights
from workloads.model.dropout import KEYS, row_keys
from workloads.model.initialise import normal
from workloads.model.masks import attends
from workloads.workload import Batch

SEEDS = 3
"""Number of random weights with which a class is tried before it is refused."""
MAX_PARAMETERS = 200_000_000
"""Maximum number of parameters of a small copy."""


Further = Callable[[HuggingFaceWorkload, HuggingFaceNetwork, Batch], None]
"""A check of a small copy of a class on some samples. It raises WorkloadError on failure."""


def check_behaviour(workload: HuggingFaceWorkload, further: Further | None = None) -> None:
    """Raise WorkloadError unless a small copy of the class, with this configuration, passes these checks and
    `further`.

    The class draws no random numbers in training. A sample's logits do not depend on the other samples. A token
    changes only logits that may see it, and packed documents give the logits of separate ones. Recomputed layers give
    the same gradients. transformers loads the export, which computes the same. With dropout, samples stay independent
    and recomputation exact.
    """
    folder = str(root(workload.config.folder))
    if has_weights(folder) and workload.config.parameters() <= MAX_PARAMETERS:
        workload.initial(
            next(iter(workload.shapes)), 0
        )  # a small checkpoint is loaded right away, to check that it fits
    problem = f"{type(workload.config.bare).__name__} cannot be trained with {workload.objective.name} here"
    failure: Exception | None = None
    for hf_config in narrowings(workload.config.hf_config()):
        try:
            with small_trial(replace(workload, dropout=0.0), hf_config) as trial:
                _check_with_seeds(trial)
                if workload.dropout:
                    _check_dropout(replace(trial, dropout=workload.dropout))
                if further is not None:
                    _check_further(trial, further)
                return
        except WorkloadError as error:
            raise WorkloadError(f"{problem}: {error}") from None
        except TooLarge as error:
            failure = failure or error
        except Exception as error:  # each class fails in its own way on widths that it cannot have
            failure = error
    reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}"
    raise WorkloadError(f"{problem}: it fails with {reason}; use another class") from failure


def _check_further(trial: HuggingFaceWorkload, further: Further) -> None:
    model = trained_model(trial, 0)
    if trial.adapter:
        move_adapter(model)
    further(trial, model, samples_of(trial))


class TooLarge(Exception):
    """The class could not be made small enough to try."""


def _check_with_seeds(trial: HuggingFaceWorkload) -> None:
    """Run the checks with up to SEEDS seeds, until one passes.

    With some weights, rounding alone makes a router choose another expert. A wrong class fails with all seeds.
    """
    for seed in range(SEEDS):
        try:
            model = trained_model(trial, seed)
            if trial.adapter:
                move_adapter(model)
            _check_all(trial, model)
            return
        except WorkloadError:
            if seed == SEEDS - 1:
                raise


@contextmanager
def small_trial(workload: HuggingFaceWorkload, hf_config: Any) -> Iterator[HuggingFaceWorkload]:
    """Yield the workload with a small configuration, few tokens and short sequences, in a temporary folder."""
    vocabulary = fewer_tokens(hf_config, workload.vocabulary)
    _keep_slack(hf_config, workload)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        hf_config.save_pretrained(folder)
        objective = replace(workload.objective, vocabulary=vocabulary, sequence_length=LENGTH)  # type: ignore[type-var]
        config = describe_hf_class(folder)
        head = workload.config.head
        if head != "language":
            config = config.with_head(head, workload.config.classes)
        trial = replace(workload, config=config, objective=objective, vocabulary=vocabulary)
        if trial.config.parameters() > MAX_PARAMETERS:
            raise TooLarge(f"{trial.config.parameters()} parameters are too many for a trial")
        yield trial


def _keep_slack(hf_config: Any, workload: HuggingFaceWorkload) -> None:
    """Give the trial as many spare learned positions beyond its sequence length as the model has, because some
    classes count positions from 2.
    """
    slack = workload.config.max_positions - workload.objective.sequence_length  # type: ignore[attr-defined]
    for part in nested_configs(hf_config):
        name = part.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        rotary = any("rope" in key or "rotary" in key for key in vars(part))
        if 0 <= slack < LENGTH and not rotary and vars(part).get(name) == workload.config.max_positions:
            setattr(part, name, LENGTH + slack)


def trained_model(workload: HuggingFaceWorkload, seed: int) -> HuggingFaceNetwork:
    """Return the model in training mode, built as the trainer builds it: on the meta device, moved, filled by tensor
    name.
    """
    with torch.device("meta"):
        model = workload.build()
    assert isinstance(model, HuggingFaceNetwork)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in workload.shapes:
                tensor.copy_(workload.initial(name, seed))
    return model.train()


@torch.no_grad()
def move_adapter(model: nn.Module) -> None:
    """Give adapter matrices, which start at zero, values that affect the output."""
    for name, parameter in model.named_parameters():
        if name.endswith(B):
            parameter.copy_(0.1 * normal(0, name, parameter.shape))


def _check_all(trial: HuggingFaceWorkload, model: HuggingFaceNetwork) -> None:
    samples = samples_of(trial)
    logits = _check_determinism(model, samples)
    _check_independence(model, samples, logits)
    check_visibility(trial, model, row_of(samples, 0))
    if attends(samples) is not None and trial.config.architecture == "decoder":
        check_documents(model, samples, logits)
    elif "attention" in samples:
        check_windows(model, samples)
    _check_balance(model, samples)
    _check_recomputation(trial, model, samples)
    _check_export(trial, model, samples)


def _check_determinism(model: nn.Module, samples: Batch) -> Tensor:
    """Return the logits. Raises WorkloadError if they depend on the state of torch's random generator."""
    torch.manual_seed(1)
    first = logits_of(model, samples)
    torch.manual_seed(2)
    if differ(first, logits_of(model, samples)):
        raise WorkloadError(
            "it draws random numbers in training, which would depend on the layout; use another class"
        )
    return first


def _check_independence(model: nn.Module, samples: Batch, logits: Tensor) -> None:
    for row in range(len(logits)):
        if differ(logits[row], logits_of(model, row_of(samples, row))[0]):
            raise WorkloadError(
                "a sample's logits depend on the other samples of its micro-batch; use another class"
            )


@torch.no_grad()
def _check_balance(model: HuggingFaceNetwork, samples: Batch) -> None:
    """Check that our router loss of one sequence equals that of the class."""
    balance = model.balance
    network = model.network
    if balance is None:
        return
    output = network(input_ids=row_of(samples, 0)["tokens"], use_cache=False, output_router_logits=True)
    loss = balance(output.router_logits, 1)
    hf_loss = output.aux_loss
    zero = torch.zeros(())
    loss = zero if loss is None else loss
    hf_loss = zero if hf_loss is None else balance.weight * hf_loss
    if differ(loss, torch.as_tensor(hf_loss)):
        raise WorkloadError(
            "it balances its routers in a way that is not known here; "
            "set workload.changes.router_aux_loss_coef to 0"
        )


def _check_recomputation(trial: HuggingFaceWorkload, model: nn.Module, samples: Batch) -> None:
    """Check that recomputed layers give the same gradients."""
    plain = _gradients(trial, model, samples)
    for block in trial.blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    again = _gradients(trial, model, samples)
    for block in trial.blocks(model):
        del block.forward
    if any(differ(plain[name], again[name]) for name in plain):
        raise WorkloadError("its layers cannot be recomputed in the backward pass; use another class")


def _gradients(trial: HuggingFaceWorkload, model: nn.Module, samples: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = trial.loss(model, samples)
    (loss.total / loss.count.clamp(min=1) + (0.0 if loss.extra is None else loss.extra)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check_dropout(trial: HuggingFaceWorkload) -> None:
    """Check that dropout has an effect, and depends only on the sample."""
    model = trained_model(trial, 0)
    samples = samples_of(trial)
    samples[KEYS] = row_keys(0, 0, 3)
    hint = "set workload.dropout to 0"
    try:
        logits = _check_determinism(model, samples)
        _check_independence(model, samples, logits)
        _check_recomputation(trial, model, samples)
    except WorkloadError:
        raise WorkloadError(f"its dropout depends on more than the sample; {hint}") from None
    if not differ(logits, logits_of(model.eval(), samples)):
        raise WorkloadError(f"it has no dropout module that can be replaced; {hint}")


def _check_export(trial: HuggingFaceWorkload, model: nn.Module, samples: Batch) -> None:
    """Check that transformers loads every tensor of the export, and computes the same."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        trial.to_hf(state.__getitem__, folder)
        again, loading_info = auto_class(trial.config).from_pretrained(folder, output_loading_info=True)
    if strange := sorted({*loading_info["missing_keys"], *loading_info["unexpected_keys"]}):
        raise WorkloadError(
            f"its export does not hold what transformers loads ({strange[0]}); use another class"
        )
    exported = trial.wrap(again)
    if differ(logits_of(model.eval(), samples), logits_of(exported.eval(), samples)):
        raise WorkloadError("its export computes something else; use another class")
