"""That a class of transformers computes what the objective says, tried on the class made small.

A class decides by itself what its masks mean, so nothing less than looking at what moves which logits is a proof.
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
"""Tokens of a sequence in the trial: several windows (`narrow.WINDOW`) and several documents."""
TOLERANCE = 1e-5
"""Largest difference of logits, as a share of the largest logit, that counts as none."""
SEEDS = 3
"""Weights that a class is tried with before it is refused."""
LARGEST = 200_000_000
"""Most parameters of a class in the trial."""
CHANGED = (0, 3, 7, 8, 9, 14, 20, LENGTH - 1)
"""Places at which a token is changed to see what moves."""
DOCUMENT = 8
"""Tokens of a document in the trial, its end included."""


def prove(workload: HuggingFaceWorkload) -> None:
    """Raise WorkloadError unless the class, with this configuration and narrow widths, holds to what follows.

    It draws no random numbers in training; a sample's logits do not depend on the other samples; a token moves only
    the logits that may see it, and packed documents come out as separate ones; recomputed layers have the same
    gradients; what is exported is loaded by transformers and computes the same. With a dropout, samples and
    recomputed layers still hold to it.
    """
    folder = str(root(workload.config.folder))
    if has_weights(folder) and workload.config.parameters() <= LARGEST:
        workload.initial(
            next(iter(workload.shapes)), 0
        )  # a small checkpoint is read at once, to see whether it fits
    what = f"{type(workload.config.bare).__name__} cannot be trained with {workload.objective.name} here"
    failed: Exception | None = None
    for theirs in narrowings(read_hf_config(workload.config.folder, dict(workload.config.changes))):
        try:
            with small(replace(workload, dropout=0.0), theirs) as trial:
                _prove_once(trial)
                if workload.dropout:
                    _dropped(replace(trial, dropout=workload.dropout))
                return
        except WorkloadError as error:
            raise WorkloadError(f"{what}: {error}") from None
        except TooLarge as error:
            failed = failed or error
        except Exception as error:  # each class fails in its own way on widths that it cannot have
            failed = error
    why = f"{type(failed).__name__}: {' '.join(str(failed).split())[:160]}"
    raise WorkloadError(f"{what}: it fails with {why}; use another class") from failed


class TooLarge(Exception):
    """A class that could not be made small enough to try."""


def _prove_once(trial: HuggingFaceWorkload) -> None:
    """Hold the class to its promises with one of a few seeds.

    The last bit of a router's score may choose another expert, with any seed; a class that is wrong is wrong with all.
    """
    for seed in range(SEEDS):
        try:
            _prove(trial, filled(trial, seed))
            return
        except WorkloadError:
            if seed == SEEDS - 1:
                raise


@contextmanager
def small(workload: HuggingFaceWorkload, theirs: Any) -> Iterator[HuggingFaceWorkload]:
    """The workload with a narrow configuration, few tokens and short sequences; its folder is gone afterwards."""
    vocabulary = fewer_tokens(theirs, workload.vocabulary)
    _keep_slack(theirs, workload)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        theirs.save_pretrained(folder)
        objective = replace(workload.objective, vocabulary=vocabulary, sequence_length=LENGTH)  # type: ignore[type-var]
        trial = replace(
            workload, config=describe_hf_class(folder), objective=objective, vocabulary=vocabulary
        )
        if trial.config.parameters() > LARGEST:
            raise TooLarge(f"{trial.config.parameters()} parameters are too many for a trial")
        yield trial


def _keep_slack(theirs: Any, workload: HuggingFaceWorkload) -> None:
    """Learned positions as many beyond the trial's sequence as the model has beyond the job's: some count from 2."""
    slack = workload.config.max_positions - workload.objective.sequence_length  # type: ignore[attr-defined]
    for part in nested_configs(theirs):
        name = part.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        rotary = any("rope" in key or "rotary" in key for key in vars(part))
        if 0 <= slack < LENGTH and not rotary and vars(part).get(name) == workload.config.max_positions:
            setattr(part, name, LENGTH + slack)


def filled(workload: HuggingFaceWorkload, seed: int) -> HuggingFaceNetwork:
    """The model in training, made as the trainer makes it: without memory, moved, filled by name."""
    with torch.device("meta"):
        model = workload.build()
    assert isinstance(model, HuggingFaceNetwork)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in workload.shapes:
                tensor.copy_(workload.initial(name, seed))
    return model.train()


def _prove(trial: HuggingFaceWorkload, model: HuggingFaceNetwork) -> None:
    samples = trial.objective.collate(Samples(_reader(trial), 3), [0, 1, 2], 0)
    logits = _steady(model, samples)
    _alone(model, samples, logits)
    _moves(trial, model, _row(samples, 0))
    if "attention" in samples and trial.config.architecture == "decoder":
        _documents(model, samples, logits)
    elif "attention" in samples:
        _windows(model, samples)
    _balanced(model, samples)
    _recomputed(trial, model, samples)
    _leaves(trial, model, samples)


def _reader(trial: HuggingFaceWorkload) -> Callable[[int], np.ndarray]:
    """Text in which sample 0 has documents of equal length, sample 1 others, and sample 2 one alone."""
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


def _steady(model: nn.Module, samples: Batch) -> Tensor:
    """The logits, which must not depend on the state of a generator."""
    torch.manual_seed(1)
    first = _logits(model, samples)
    torch.manual_seed(2)
    if _differ(first, _logits(model, samples)):
        raise WorkloadError(
            "it draws random numbers in training, which would depend on the layout; use another class"
        )
    return first


def _alone(model: nn.Module, samples: Batch, logits: Tensor) -> None:
    for row in range(len(logits)):
        if _differ(logits[row], _logits(model, _row(samples, row))[0]):
            raise WorkloadError(
                "a sample's logits depend on the other samples of its micro-batch; use another class"
            )


def _moves(trial: HuggingFaceWorkload, model: nn.Module, base: Batch) -> None:
    """Change one token, and look at which logits move."""
    pair = trial.config.architecture == "encoder-decoder"
    key = "decoder_tokens" if pair else "tokens"
    real = base["padding"][0] if "padding" in base else torch.ones_like(base["tokens"][0], dtype=torch.bool)
    length = base[key].shape[1]
    reach = torch.ones(length, length, dtype=torch.bool).tril() if pair else _reach(trial, base, real)
    rows = torch.ones(length, dtype=torch.bool) if pair else real
    _hold(trial, model, base, key, reach & rows[:, None], rows)
    if pair:
        _hold(trial, model, base, "tokens", real[None, :].expand(length, -1), rows)


def _reach(trial: HuggingFaceWorkload, base: Batch, real: Tensor) -> Tensor:
    """bool [L, L]: whose logits a token may move, through any number of layers."""
    if "attention" in base:
        sees = base["attention"][0]
    elif trial.config.architecture == "decoder":
        return torch.ones(len(real), len(real), dtype=torch.bool).tril()
    else:
        sees = real[None, :].expand(len(real), -1)
    sees = sees | torch.eye(len(real), dtype=torch.bool)
    for _ in range(len(real).bit_length()):
        sees = (sees.float() @ sees.float()) > 0
    return sees


def _hold(
    trial: HuggingFaceWorkload, model: nn.Module, base: Batch, key: str, reach: Tensor, rows: Tensor
) -> None:
    """Raise WorkloadError if a token of base[key] moves logits among `rows` that `reach` [rows, tokens] denies it."""
    places = [place for place in CHANGED if place < base[key].shape[1]]
    batch = {name: value.repeat_interleave(len(places) + 1, 0) for name, value in base.items()}
    special = trial.vocabulary.special
    other = [token for token in range(trial.vocabulary.size) if token not in special][:2]
    for number, place in enumerate(places, start=1):
        old = int(base[key][0, place])
        batch[key][number, place] = other[1] if old == other[0] else other[0]
    logits = _logits(model, batch)
    limit, moved = _limit(logits), (logits[1:] - logits[0]).abs().amax(-1)
    allowed = torch.stack([reach[:, place] for place in places])
    if (moved[~allowed & rows] > limit).any():
        raise WorkloadError(_leak(trial, base))
    if not (moved[allowed & rows] > limit).any():
        raise WorkloadError("its logits do not depend on its tokens; use another class")


def _leak(trial: HuggingFaceWorkload, base: Batch) -> str:
    what = "a token's logits depend on tokens that it must not see"
    if trial.config.architecture != "decoder":
        return f"{what}; use another objective or class"
    if "attention" in base:
        return f"{what}, of other documents or later ones; set workload.options.documents to pack"
    undecided = getattr(trial.config.bare.config, "is_decoder", None) is False
    return f"{what}; " + ("set workload.changes.is_decoder to true" if undecided else "use another class")


def _documents(model: nn.Module, samples: Batch, logits: Tensor) -> None:
    """Packed documents come out as separate ones."""
    for row, positions in enumerate(samples["positions"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            alone = _logits(model, {"tokens": samples["tokens"][row : row + 1, start:end]})
            if _differ(alone[0], logits[row, start:end]):
                raise WorkloadError(
                    "packed documents come out otherwise than separate ones; set workload.options.documents to pack"
                )


def _windows(model: nn.Module, samples: Batch) -> None:
    """A mask that hides nothing changes nothing: the class keeps the windows of its own."""
    tokens = samples["tokens"]
    everything = torch.ones(len(tokens), LENGTH, LENGTH, dtype=torch.bool)
    if _differ(
        _logits(model, {"tokens": tokens}), _logits(model, {"tokens": tokens, "attention": everything})
    ):
        raise WorkloadError("it takes a mask in place of its own windows; use another objective")


@torch.no_grad()
def _balanced(model: HuggingFaceNetwork, samples: Batch) -> None:
    """The routers' loss of one sequence is what the class says."""
    balance, network = model.balance, model.network
    if balance is None:
        return
    found = network(input_ids=_row(samples, 0)["tokens"], use_cache=False, output_router_logits=True)
    ours, theirs = balance(found.router_logits, 1), found.aux_loss
    zero = torch.zeros(())
    ours, theirs = zero if ours is None else ours, zero if theirs is None else balance.weight * theirs
    if _differ(ours, torch.as_tensor(theirs)):
        raise WorkloadError(
            "it balances its routers in a way that is not known here; "
            "set workload.changes.router_aux_loss_coef to 0"
        )


def _recomputed(trial: HuggingFaceWorkload, model: nn.Module, samples: Batch) -> None:
    """Blocks that keep nothing but their input have the gradients of those that keep everything."""
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


def _dropped(trial: HuggingFaceWorkload) -> None:
    """Dropout is at work, and depends on nothing but the sample."""
    model, samples = filled(trial, 0), trial.objective.collate(Samples(_reader(trial), 3), [0, 1, 2], 0)
    samples[KEYS] = row_keys(0, 0, 3)
    hint = "set workload.dropout to 0"
    try:
        logits = _steady(model, samples)
        _alone(model, samples, logits)
        _recomputed(trial, model, samples)
    except WorkloadError:
        raise WorkloadError(f"its dropout depends on more than the sample; {hint}") from None
    if not _differ(logits, _logits(model.eval(), samples)):
        raise WorkloadError(f"it has no dropout module that can be replaced; {hint}")


def _leaves(trial: HuggingFaceWorkload, model: nn.Module, samples: Batch) -> None:
    """What is exported is loaded by transformers, whole, and computes the same."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        trial.to_hf(state.__getitem__, folder)
        again, found = auto_class(trial.config).from_pretrained(folder, output_loading_info=True)
    if strange := sorted({*found["missing_keys"], *found["unexpected_keys"]}):
        raise WorkloadError(
            f"its export does not hold what transformers loads ({strange[0]}); use another class"
        )
    theirs = trial.around(again)
    if _differ(_logits(model.eval(), samples), _logits(theirs.eval(), samples)):
        raise WorkloadError("its export computes something else; use another class")


def _row(samples: Batch, row: int) -> Batch:
    return {name: value[row : row + 1] for name, value in samples.items()}


def _limit(logits: Tensor) -> float:
    return TOLERANCE * max(float(logits.abs().max()), 1e-3)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or float((one - other).abs().max()) > _limit(one)
