"""Quantise an ONNX model to int8, by onnxruntime's own tools.

Dynamic: weights are int8 with a scale for each output, and activations are rounded as they come. Static: activations
have fixed ranges, the minima and maxima over samples (MinMax of Jacob et al., 2018, section 3.1), which are reduced as
they are computed.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from orchestrator.extensions.onnx.write import FILE, LENGTHS, session_of, tried_batch
from workloads.workload import Batch

QUANTISED = ("MatMul", "Gemm", "Gather")
"""Operators whose weights are quantised: those of linear layers, and the tables of embeddings, which are the largest
part of a small encoder. A table has one scale.
"""
NAMES = {"input_ids": "tokens", "attention_mask": "padding", "token_type_ids": "token_types"}
"""Our names of the inputs."""


def quantise_onnx(folder: str, samples: Iterable[Batch] | None) -> float:
    """Replace `folder`/model.onnx by its int8 form.

    Args:
        folder: an export by `export_onnx`.
        samples: batches over which the ranges of activations are measured; None to round activations as they come.

    Returns the largest difference of its outputs, as a share of the largest number. Raises RuntimeError if they are
    not finite.
    """
    path = Path(folder) / FILE
    plain = path.with_name("plain.onnx")
    path.rename(plain)
    try:
        # Its tools write hints to the root logger and to standard output.
        with contextlib.redirect_stdout(io.StringIO()), _quiet():
            if samples is None:
                _dynamic(plain, path)
            else:
                _static(plain, path, samples)
        return _apart(plain, path, folder)
    finally:
        plain.unlink()


def _dynamic(plain: Path, path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        str(plain),
        str(path),
        op_types_to_quantize=list(QUANTISED),
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


def _static(plain: Path, path: Path, samples: Iterable[Batch]) -> None:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    quantize_static(
        str(plain),
        str(path),
        _Reader(plain, samples),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=list(QUANTISED),
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
        calibrate_method=CalibrationMethod.MinMax,
        # It keeps two numbers of a batch for each tensor. CalibMaxIntermediateOutputs, which is to keep fewer, drops
        # what it has measured.
        extra_options={"MatMulConstBOnly": True},
    )


class _Reader:
    """Gives onnxruntime one batch at a time."""

    def __init__(self, plain: Path, samples: Iterable[Batch]) -> None:
        self._inputs = [each.name for each in session_of(plain).get_inputs()]
        self._samples: Iterator[Batch] = iter(samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch; None after the last."""
        batch = next(self._samples, None)
        if batch is None:
            return None
        shape = batch["tokens"].shape
        usual = {
            "padding": torch.ones(shape, dtype=torch.int64),
            "token_types": torch.zeros(shape, dtype=torch.int64),
        }
        return {name: {**usual, **batch}[NAMES[name]].long().numpy() for name in self._inputs}


def kept_in_model(folder: str) -> list[str]:
    """Return the matrices of a quantised model that are not int8."""
    import onnx

    graph = onnx.load(str(Path(folder) / FILE)).graph
    return sorted(
        each.name
        for each in graph.initializer
        if len(each.dims) == 2 and min(each.dims) > 1 and each.data_type == onnx.TensorProto.FLOAT
    )


def _apart(plain: Path, path: Path, folder: str) -> float:
    config = json.loads((Path(folder) / "config.json").read_text())
    size, pad = config["vocab_size"], config.get("pad_token_id")
    exact, rounded = session_of(plain), session_of(path)
    inputs = [each.name for each in exact.get_inputs()]
    longest = config.get("max_position_embeddings", LENGTHS[-1]) - 2
    worst = 0.0
    for length in sorted({min(length, longest) for length in LENGTHS}):
        batch = {name: tensor.numpy() for name, tensor in tried_batch(size, pad, inputs, length).items()}
        is_token = batch["attention_mask"].astype(bool)
        for expected, actual in zip(exact.run(None, batch), rounded.run(None, batch), strict=True):
            of_tokens = expected.shape[:2] == is_token.shape
            expected, actual = (each[is_token] if of_tokens else each for each in (expected, actual))
            worst = max(worst, float(abs(expected - actual).max() / max(abs(expected).max(), 1.0)))
            if not np.isfinite(actual).all():
                raise RuntimeError("the quantised model's outputs are not finite; nothing was published")
    return worst


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
