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
from workloads.errors import WorkloadError
from workloads.hf.export.dcp_export import copy_others
from workloads.hf.files.hf_config import GENERATOR
from workloads.hf.files.weight_files import Weights
from workloads.model.fake_quantise import TOKEN_LEVELS, fake_quantised_tokens, largest_of_tokens, quantise
from workloads.model.scheme import Scheme

UINT8, FLOAT = 2, 1
"""Types of numbers in ONNX (`onnx.TensorProto`)."""
ZERO = 128
"""The offset that makes factors of -128 .. 127 unsigned. onnxruntime is four times as fast if both are unsigned.
Signed weights would be twice as fast again, but then large sums saturate on processors without VNNI instructions.
"""
WEIGHT = ".weight"


def round_layers(model: nn.Module, chosen: Mapping[str, Scheme]) -> list[str]:
    """Replace linear layers of a model of transformers by layers with the integers that training used.

    A weight is stored as int8 with a scale for each output. Without rounded activations it is multiplied in fp32. With
    them, each token is rounded to integers as in training (`workloads.model.fake_quantise.fake_quantised_tokens`), and
    MatMulInteger multiplies integers by integers, which is exact: the scales are applied to the sums.

    Args:
        model: the model.
        chosen: the names of their weights, with their scheme: int8, and a scale for each row.

    Returns the names of the linear layers that stay in full precision. Raises WorkloadError if a weight belongs to no
    linear layer.
    """
    for name, scheme in chosen.items():
        path = name.removesuffix(WEIGHT)
        layer = model.get_submodule(path)
        if type(layer) is not nn.Linear:
            raise WorkloadError(
                f"{type(model).__name__} of transformers stores {path} outside a linear layer; export it without "
                "quantisation"
            )
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _RoundedLinear(layer, scheme.activations))
    return sorted(name for name, module in model.named_modules() if type(module) is nn.Linear)


class _RoundedLinear(nn.Module):
    """A linear layer with integers [in, out] and scales [out]. The integers have ZERO added if tokens are rounded."""

    integers: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, rounds_tokens: bool) -> None:
        super().__init__()
        integers, scale = quantise(layer.weight.detach().float(), Scheme("int8", 0))
        integers = integers.flatten(1)
        stored = (integers + ZERO).to(torch.uint8) if rounds_tokens else integers.to(torch.int8)
        self.register_buffer("integers", stored.t().contiguous())
        self.register_buffer("scale", scale.flatten())
        self.bias = layer.bias
        self.product = _WithRoundedTokens if rounds_tokens else _WithTokens

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out]."""
        y: Tensor = self.product.apply(x, self.integers, self.scale)
        return y if self.bias is None else y + self.bias


class _WithTokens(torch.autograd.Function):
    """x [.., in] times the weight, and how ONNX writes that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
        return x @ (integers * scale)

    @staticmethod
    def symbolic(g: Any, x: Any, integers: Any, scale: Any) -> Any:
        # Not DequantizeLinear: onnxruntime 1.32 merges that with MatMul and rounds the activations too (1 % of the
        # largest logit of a small BERT), and 1.26 refuses it where a Transpose comes between.
        weight = g.op("Mul", g.op("Cast", integers, to_i=FLOAT), scale)
        return g.op("MatMul", x, weight)


class _WithRoundedTokens(torch.autograd.Function):
    """The same for tokens that are rounded to int8, each with its own scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
        rounded = fake_quantised_tokens(x, largest_of_tokens(x))
        return rounded @ ((integers.float() - ZERO) * scale)

    @staticmethod
    def symbolic(g: Any, x: Any, integers: Any, scale: Any) -> Any:
        def number(value: float, dtype: torch.dtype = torch.float32) -> Any:
            return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))

        largest = g.op("ReduceMax", g.op("Abs", x), axes_i=[-1], keepdims_i=1)
        step = g.op("Div", largest, number(TOKEN_LEVELS))
        # A token of zeros would divide 0 by 0.
        is_zero = g.op("Equal", step, number(0.0))
        step = g.op("Where", is_zero, number(torch.finfo(torch.float32).eps), step)
        tokens = g.op("Clip", g.op("Round", g.op("Div", x, step)), number(-128.0), number(127.0))
        tokens = g.op("Cast", g.op("Add", tokens, number(ZERO)), to_i=UINT8)
        zeros = (number(ZERO, torch.uint8), number(ZERO, torch.uint8))
        sums = g.op("Cast", g.op("MatMulInteger", tokens, integers, *zeros), to_i=FLOAT)
        return g.op("Mul", g.op("Mul", sums, step), scale)


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
            None for fp32. See `round_layers`.

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
