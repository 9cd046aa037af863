"""Checks that a Hugging Face class run as it is computes what the objective says, on a small copy of the class.

A class decides by itself what its masks mean, so the checks change tokens and look at which logits change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workloads.errors import WorkloadError
from workloads.hf.hf_class import auto_class, describe_hf_class
from workloads.hf.hf_config import nested_configs, read_hf_config, root
from workloads.hf.network import HuggingFaceNetwork
from workloads.hf.small_copy import fewer_tokens, narrowings
from workloads.hf.weights import has_weights
from workloads.hf.workload import HuggingFaceWorkload
from workloads.model.dropout import KEYS, row_keys
from workloads.objectives.samples import Samples
from workloads.workload import Batch

LENGTH = 24
"""Tokens of a sequence in the trial: several windows (`small_copy.WINDOW`) and several documents."""
TOLERANCE = 1e-5
"""Logits that differ by at most this share of the largest logit count as equal."""
SEEDS = 3
"""Number of random weights with which a class is tried before it is refused."""
MAX_PARAMETERS = 200_000_000
"""Most parameters of a small copy."""
CHANGED_POSITIONS = (0, 3, 7, 8, 9, 14, 20, LENGTH - 1)
"""Positions at which a token is changed to see which logits change."""
DOCUMENT = 8
"""Tokens of a document in the trial, with its end token."""


def check_behaviour(workload: HuggingFaceWorkload) -> None:
    """Raise WorkloadError unless a small copy of the class, with this configuration, passes these checks:

    it draws no random numbers in training; a sample's logits do not depend on the other samples; a token changes only
    logits that may see it, and packed documents give the logits of separate ones; recomputed layers give the same
    gradients; transformers loads the export, which computes the same. With dropout, samples stay independent and
    recomputation exact.
    """
    folder = str(root(workload.config.folder))
    if has_weights(folder) and workload.config.parameters() <= MAX_PARAMETERS:
        workload.initial(
            next(iter(workload.shapes)), 0
        )  # a small checkpoint is read at once, to see whether it fits
    what = f"{type(workload.config.bare).__name__} cannot be trained with {workload.objective.name} here"
    failure: Exception | None = None
    for hf_config in narrowings(read_hf_config(workload.config.folder, dict(workload.config.changes))):
        try:
            with small_trial(replace(workload, dropout=0.0), hf_config) as trial:
                _check_with_seeds(trial)
                if workload.dropout:
                    _check_dropout(replace(trial, dropout=workload.dropout))
                return
        except WorkloadError as error:
            raise WorkloadError(f"{what}: {error}") from None
        except TooLarge as error:
            failure = failure or error
        except Exception as error:  # each class fails in its own way on widths that it cannot have
            failure = error
    reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}"
    raise WorkloadError(f"{what}: it fails with {reason}; use another class") from failure


class TooLarge(Exception):
    """The class could not be made small enough to try."""


def _check_with_seeds(trial: HuggingFaceWorkload) -> None:
    """Run the checks with up to SEEDS seeds, until one passes.

    With some weights rounding alone makes a router choose another expert; a class that is wrong fails with all seeds.
    """
    for seed in range(SEEDS):
        try:
            _check_all(trial, trained_model(trial, seed))
            return
        except WorkloadError:
            if seed == SEEDS - 1:
                raise


@contextmanager
def small_trial(workload: HuggingFaceWorkload, hf_config: Any) -> Iterator[HuggingFaceWorkload]:
    """The workload with a small configuration, few tokens and short sequences, in a folder that is removed at the
    end."""
    vocabulary = fewer_tokens(hf_config, workload.vocabulary)
    _keep_slack(hf_config, workload)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        hf_config.save_pretrained(folder)
        objective = replace(workload.objective, vocabulary=vocabulary, sequence_length=LENGTH)  # type: ignore[type-var]
        trial = replace(
            workload, config=describe_hf_class(folder), objective=objective, vocabulary=vocabulary
        )
        if trial.config.parameters() > MAX_PARAMETERS:
            raise TooLarge(f"{trial.config.parameters()} parameters are too many for a trial")
        yield trial


def _keep_slack(hf_config: Any, workload: HuggingFaceWorkload) -> None:
    """Give the trial as many learned positions beyond its sequence length as the model has beyond the job's, since some
    classes count positions from 2."""
    slack = workload.config.max_positions - workload.objective.sequence_length  # type: ignore[attr-defined]
    for part in nested_configs(hf_config):
        name = part.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        rotary = any("rope" in key or "rotary" in key for key in vars(part))
        if 0 <= slack < LENGTH and not rotary and vars(part).get(name) == workload.config.max_positions:
            setattr(part, name, LENGTH + slack)


def trained_model(workload: HuggingFaceWorkload, seed: int) -> HuggingFaceNetwork:
    """The model in training mode, made as the trainer makes it: on the meta device, moved, filled by tensor name."""
    with torch.device("meta"):
        model = workload.build()
    assert isinstance(model, HuggingFaceNetwork)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in workload.shapes:
                tensor.copy_(workload.initial(name, seed))
    return model.train()


def _check_all(trial: HuggingFaceWorkload, model: HuggingFaceNetwork) -> None:
    samples = trial.objective.collate(Samples(_reader(trial), 3), [0, 1, 2], 0)
    logits = _check_determinism(model, samples)
    _check_independence(model, samples, logits)
    _check_visibility(trial, model, _row(samples, 0))
    if "attention" in samples and trial.config.architecture == "decoder":
        _check_documents(model, samples, logits)
    elif "attention" in samples:
        _check_windows(model, samples)
    _check_balance(model, samples)
    _check_recomputation(trial, model, samples)
    _check_export(trial, model, samples)


def _reader(trial: HuggingFaceWorkload) -> Callable[[int], np.ndarray]:
    """A reader of random text: sample 0 has documents of equal length, sample 1 of other lengths, sample 2 one only."""
    text = sorted(set(range(trial.vocabulary.size)) - trial.vocabulary.special)[:200]
    length = trial.objective.window(LENGTH)

    def read(sample: int) -> np.ndarray:
        tokens = np.random.default_rng(sample).choice(text, length)
        if sample < 2:
            tokens[DOCUMENT - 1 - 3 * sample :: DOCUMENT] = trial.vocabulary.eos
        return tokens

    return read


@torch.no_grad()
def _logits(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch).logits
    if not torch.is_tensor(found) or not torch.isfinite(found).all():
        raise WorkloadError("its logits are no numbers; use another class")
    return found


def _check_determinism(model: nn.Module, samples: Batch) -> Tensor:
    """The logits. Raises WorkloadError if they depend on the state of torch's random generator."""
    torch.manual_seed(1)
    first = _logits(model, samples)
    torch.manual_seed(2)
    if _differ(first, _logits(model, samples)):
        raise WorkloadError(
            "it draws random numbers in training, which would depend on the layout; use another class"
        )
    return first


def _check_independence(model: nn.Module, samples: Batch, logits: Tensor) -> None:
    for row in range(len(logits)):
        if _differ(logits[row], _logits(model, _row(samples, row))[0]):
            raise WorkloadError(
                "a sample's logits depend on the other samples of its micro-batch; use another class"
            )


def _check_visibility(trial: HuggingFaceWorkload, model: nn.Module, base: Batch) -> None:
    """Change one token at a time, and check which logits change."""
    pair = trial.config.architecture == "encoder-decoder"
    key = "decoder_tokens" if pair else "tokens"
    real = base["padding"][0] if "padding" in base else torch.ones_like(base["tokens"][0], dtype=torch.bool)
    length = base[key].shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril() if pair else _visible(trial, base, real)
    rows = torch.ones(length, dtype=torch.bool) if pair else real
    _check_influence(trial, model, base, key, visible & rows[:, None], rows)
    if pair:
        _check_influence(trial, model, base, "tokens", real[None, :].expand(length, -1), rows)


def _visible(trial: HuggingFaceWorkload, base: Batch, real: Tensor) -> Tensor:
    """bool [L, L]: whether the logits of a row may depend on a token, through any number of layers."""
    if "attention" in base:
        attends = base["attention"][0]
    elif trial.config.architecture == "decoder":
        return torch.ones(len(real), len(real), dtype=torch.bool).tril()
    else:
        attends = real[None, :].expand(len(real), -1)
    attends = attends | torch.eye(len(real), dtype=torch.bool)
    for _ in range(len(real).bit_length()):
        attends = (attends.float() @ attends.float()) > 0
    return attends


def _check_influence(
    trial: HuggingFaceWorkload, model: nn.Module, base: Batch, key: str, visible: Tensor, rows: Tensor
) -> None:
    """Raise WorkloadError if a token of base[key] changes logits among `rows` although `visible` [rows, tokens] is
    False, or if no token changes any."""
    positions = [position for position in CHANGED_POSITIONS if position < base[key].shape[1]]
    batch = {name: value.repeat_interleave(len(positions) + 1, 0) for name, value in base.items()}
    special = trial.vocabulary.special
    other = [token for token in range(trial.vocabulary.size) if token not in special][:2]
    for number, position in enumerate(positions, start=1):
        old = int(base[key][0, position])
        batch[key][number, position] = other[1] if old == other[0] else other[0]
    logits = _logits(model, batch)
    limit, moved = _limit(logits), (logits[1:] - logits[0]).abs().amax(-1)
    allowed = torch.stack([visible[:, position] for position in positions])
    if (moved[~allowed & rows] > limit).any():
        raise WorkloadError(_leak_message(trial, base))
    if not (moved[allowed & rows] > limit).any():
        raise WorkloadError("its logits do not depend on its tokens; use another class")


def _leak_message(trial: HuggingFaceWorkload, base: Batch) -> str:
    what = "a token's logits depend on tokens that it must not see"
    if trial.config.architecture != "decoder":
        return f"{what}; use another objective or class"
    if "attention" in base:
        return f"{what}, of other documents or later ones; set workload.options.documents to pack"
    undecided = getattr(trial.config.bare.config, "is_decoder", None) is False
    return f"{what}; " + ("set workload.changes.is_decoder to true" if undecided else "use another class")


def _check_documents(model: nn.Module, samples: Batch, logits: Tensor) -> None:
    """Check that packed documents have the same logits as separate ones."""
    for row, positions in enumerate(samples["positions"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            alone = _logits(model, {"tokens": samples["tokens"][row : row + 1, start:end]})
            if _differ(alone[0], logits[row, start:end]):
                raise WorkloadError(
                    "packed documents come out otherwise than separate ones; set workload.options.documents to pack"
                )


def _check_windows(model: nn.Module, samples: Batch) -> None:
    """Check that a mask which hides nothing changes nothing: the class keeps its own windows."""
    tokens = samples["tokens"]
    everything = torch.ones(len(tokens), LENGTH, LENGTH, dtype=torch.bool)
    if _differ(
        _logits(model, {"tokens": tokens}), _logits(model, {"tokens": tokens, "attention": everything})
    ):
        raise WorkloadError("it takes a mask in place of its own windows; use another objective")


@torch.no_grad()
def _check_balance(model: HuggingFaceNetwork, samples: Batch) -> None:
    """Check that our routers' loss of one sequence is that of the class."""
    balance, network = model.balance, model.network
    if balance is None:
        return
    found = network(input_ids=_row(samples, 0)["tokens"], use_cache=False, output_router_logits=True)
    loss, hf_loss = balance(found.router_logits, 1), found.aux_loss
    zero = torch.zeros(())
    loss, hf_loss = zero if loss is None else loss, zero if hf_loss is None else balance.weight * hf_loss
    if _differ(loss, torch.as_tensor(hf_loss)):
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
    if any(_differ(plain[name], again[name]) for name in plain):
        raise WorkloadError("its layers cannot be recomputed in the backward pass; use another class")


def _gradients(trial: HuggingFaceWorkload, model: nn.Module, samples: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = trial.loss(model, samples)
    (loss.total / loss.count.clamp(min=1) + (0.0 if loss.extra is None else loss.extra)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check_dropout(trial: HuggingFaceWorkload) -> None:
    """Check that dropout has an effect, and depends on nothing but the sample."""
    model = trained_model(trial, 0)
    samples = trial.objective.collate(Samples(_reader(trial), 3), [0, 1, 2], 0)
    samples[KEYS] = row_keys(0, 0, 3)
    hint = "set workload.dropout to 0"
    try:
        logits = _check_determinism(model, samples)
        _check_independence(model, samples, logits)
        _check_recomputation(trial, model, samples)
    except WorkloadError:
        raise WorkloadError(f"its dropout depends on more than the sample; {hint}") from None
    if not _differ(logits, _logits(model.eval(), samples)):
        raise WorkloadError(f"it has no dropout module that can be replaced; {hint}")


def _check_export(trial: HuggingFaceWorkload, model: nn.Module, samples: Batch) -> None:
    """Check that transformers loads every tensor of the export, and computes the same."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        trial.to_hf(state.__getitem__, folder)
        again, found = auto_class(trial.config).from_pretrained(folder, output_loading_info=True)
    if strange := sorted({*found["missing_keys"], *found["unexpected_keys"]}):
        raise WorkloadError(
            f"its export does not hold what transformers loads ({strange[0]}); use another class"
        )
    exported = trial.wrap(again)
    if _differ(_logits(model.eval(), samples), _logits(exported.eval(), samples)):
        raise WorkloadError("its export computes something else; use another class")


def _row(samples: Batch, row: int) -> Batch:
    return {name: value[row : row + 1] for name, value in samples.items()}


def _limit(logits: Tensor) -> float:
    return TOLERANCE * max(float(logits.abs().max()), 1e-3)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or float((one - other).abs().max()) > _limit(one)
