"""Export an encoder as an ONNX model, for onnxruntime and others."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from orchestrator.export.kinds import Written
from orchestrator.extensions.onnx.rounded_layers import round_layers
from workloads.errors import WorkloadError
from workloads.hf.export.dcp_export import copy_others
from workloads.hf.files.hf_config import GENERATOR
from workloads.hf.files.weight_files import Weights
from workloads.model.scheme import Scheme

FILE = "model.onnx"
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "ernie", "albert", "electra")
OPSET = 17
LARGEST = 2 * 2**30 - 2**20
"""Bytes of weights that a protobuf file can hold."""
TOLERANCE = 1e-4
"""Largest difference of the outputs, as a share of the largest number above one, because runtimes order sums
differently.
"""
LENGTHS = (1, 7, 32, 61)
Outputs: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]
"""A batch, and a model's outputs for it."""


def export_onnx(plain: str, folder: str, chosen: Mapping[str, Scheme] | None = None) -> Written:
    """Write the export in `plain` to `folder`/model.onnx, for batches of any size and length, with configuration and
    tokenizer.

    Inputs and outputs have transformers' names.

    Args:
        plain: an export for transformers.
        folder: where to write.
        chosen: transformers' names of the weights that are stored in int8, with their scheme, a scale for each row;
            None for fp32. See `orchestrator.extensions.onnx.rounded_layers`.

    Returns the differences of outputs: by rounding, and of onnxruntime's to torch's. Raises WorkloadError if it is not
    an encoder, RuntimeError if onnxruntime's results differ from torch's.
    """
    import transformers

    config = json.loads((Path(plain) / "config.json").read_text())
    check_onnx(config, (Path(plain) / GENERATOR).exists())
    _check_size(plain)
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(
        plain, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    inputs = ["input_ids", "attention_mask"]
    if model.config.model_type != "distilbert" and getattr(model.config, "type_vocab_size", 0) > 1:
        inputs.append("token_type_ids")
    tried = _batch(model, inputs, 8)
    with torch.no_grad():
        outputs = [name for name, value in model(**tried).items() if isinstance(value, Tensor)]
        of_tokens = [name for name in outputs if model(**tried)[name].shape[:2] == tried["input_ids"].shape]
    axes = {name: {0: "batch", 1: "sequence"} for name in (*inputs, *of_tokens)}
    axes |= {name: {0: "batch"} for name in outputs if name not in of_tokens}
    exact = _tried(model, inputs) if chosen else []
    kept = round_layers(model, chosen) if chosen else []
    wrapped = _Named(model, inputs, outputs).eval()  # the exporter restores this mode for all modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the tracer about sizes, which are dynamic axes
        torch.onnx.export(
            wrapped, tuple(tried.values()), str(Path(folder) / FILE), input_names=inputs, output_names=outputs,
            dynamic_axes=axes, opset_version=OPSET, dynamo=False,
            do_constant_folding=not chosen,  # which would store the integers times their scales
        )  # fmt: skip
    copy_others(plain, folder)
    wanted = _tried(model, inputs)
    apart, where = _apart(wanted, _run(Path(folder) / FILE, outputs, wanted))
    rounding = _apart(exact, wanted)[0] if chosen else None
    if not apart <= _allowed(rounding, chosen):
        raise RuntimeError(f"onnxruntime's {where} differ by {apart:.2e}; nothing was published")
    return Written(apart, rounding, kept)


def _allowed(rounding: float | None, chosen: Mapping[str, Scheme] | None) -> float:
    """Return the largest allowed difference between onnxruntime's outputs and torch's.

    Activations that are rounded depend on the order of sums, as both round a few to different integers, and the next
    layers more of them. Then both are at most as far from each other as from the model in full precision.
    """
    if rounding is None or not any(scheme.activations for scheme in (chosen or {}).values()):
        return TOLERANCE
    return max(TOLERANCE, 2 * rounding)


def check_onnx(config: Mapping[str, Any], paired: bool) -> None:
    """Raise WorkloadError if the model of this config.json, or a pair of models, cannot be exported."""
    if config["model_type"] not in ENCODERS or paired:
        raise WorkloadError(
            f"ONNX export supports single encoders ({', '.join(ENCODERS)}), but this is "
            f"{config['architectures'][0]}; export it for transformers"
        )


def _check_size(plain: str) -> None:
    weights = Weights(plain)
    if (size := sum(4 * weights.shape(name).numel() for name in weights.names)) > LARGEST:
        raise WorkloadError(
            f"the weights are {size / 2**30:.1f} GiB, but an ONNX file holds at most 2; export it for transformers"
        )


class _Named(nn.Module):
    """A transformers model with inputs and outputs by position."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of a batch."""
        result = self.model(**dict(zip(self.inputs, values, strict=True)))
        return tuple(result[name] for name in self.outputs)


def _batch(model: Any, inputs: Sequence[str], length: int) -> dict[str, Tensor]:
    return tried_batch(model.config.vocab_size, model.config.pad_token_id, inputs, length)


def tried_batch(size: int, padding: int | None, inputs: Sequence[str], length: int) -> dict[str, Tensor]:
    """Return three rows of a vocabulary: a full one, one padded at its end, and one with a single token."""
    pad = padding or 0
    tokens = (torch.arange(3 * length).view(3, length) * 7 + 11) % size
    tokens = torch.where(tokens == pad, (pad + 1) % size, tokens)
    ends = torch.tensor([length, (length + 1) // 2, 1])
    mask = torch.arange(length) < ends[:, None]
    types = (torch.arange(length) >= length // 2).expand(3, -1)
    made = {"input_ids": tokens.masked_fill(~mask, pad), "attention_mask": mask.long()}
    made["token_type_ids"] = types.long()
    return {name: made[name] for name in inputs}


def _tried(model: Any, inputs: Sequence[str]) -> list[Outputs]:
    """Return batches of several lengths, with the outputs of a model of transformers."""
    longest = getattr(model.config, "max_position_embeddings", LENGTHS[-1]) - 2
    result = []
    for length in sorted({min(length, longest) for length in LENGTHS}):
        batch = _batch(model, inputs, length)
        with torch.no_grad():
            result.append(
                (batch, {name: each for name, each in model(**batch).items() if torch.is_tensor(each)})
            )
    return result


def _run(path: Path, outputs: Sequence[str], tried: Sequence[Outputs]) -> list[Outputs]:
    """Return the same batches with the outputs of onnxruntime."""
    session = session_of(path)
    result = []
    for batch, _ in tried:
        values = session.run(outputs, {name: tensor.numpy() for name, tensor in batch.items()})
        result.append((batch, dict(zip(outputs, map(torch.from_numpy, values), strict=True))))
    return result


def _apart(expected: Sequence[Outputs], actual: Sequence[Outputs]) -> tuple[float, str]:
    """Return the largest difference of outputs, without those of padding, as a share of the largest number above one,
    and of which output it is.
    """
    worst, where = -1.0, ""
    for (batch, one), (_, other) in zip(expected, actual, strict=True):
        is_token = batch["attention_mask"].bool()
        for name, found in other.items():
            wanted = one[name]
            if wanted.shape[:2] == is_token.shape:
                wanted, found = wanted[is_token], found[is_token]
            apart = float((wanted - found).abs().max() / wanted.abs().max().clamp(min=1))
            if not apart <= worst:  # also if it is not a number
                worst, where = apart, f"{name} of {is_token.shape[1]} tokens"
                if not math.isfinite(apart):
                    return math.inf, where
    return worst, where


def session_of(path: Path) -> Any:
    """Return onnxruntime's session of a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
