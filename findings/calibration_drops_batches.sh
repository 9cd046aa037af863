#!/usr/bin/env bash
# onnxruntime's option for calibration in little memory drops what was measured.
#
# Guess: CalibMaxIntermediateOutputs=2 measures ranges over all batches, holding the outputs of two at a time: its
#   documentation says that it "will produce the same result as all computing with None, but is more memory efficient".
# Behaviour: the outputs are cleared when there are two, without being merged into the ranges. The ranges are those of
#   the batches after the last full pair; if the number of batches is even, it ends in "No data is collected".
# Packages: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6
# Why it matters: the static int8 model is calibrated on the last batch of any number, and activations beyond its range
#   are clipped. Nothing says so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6

venv/bin/python - <<'PY'
import logging

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationMethod, QuantFormat, quantize_static

logging.disable(logging.WARNING)
print("version: onnxruntime", onnxruntime.__version__)
print("guess: the range of the input is that of all five batches, 0 to 50, with the option as without")
weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "weight")
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weight"], ["y"])], "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])], [weight],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "plain.onnx")


class Reader:
    """Batches whose largest numbers are 50, 40, 30, 20, 10."""

    def __init__(self, count):
        self.batches = iter([{"x": np.full((1, 4), 50.0 - 10 * i, np.float32)} for i in range(count)])

    def get_next(self):
        return next(self.batches, None)


def top_of_range(count, **options):
    quantize_static(
        "plain.onnx", "out.onnx", Reader(count), quant_format=QuantFormat.QDQ,
        calibrate_method=CalibrationMethod.MinMax, extra_options=options,
    )
    stored = {each.name: numpy_helper.to_array(each) for each in onnx.load("out.onnx").graph.initializer}
    scale, zero = float(stored["x_scale"]), int(stored["x_zero_point"])
    return scale * ((127 if stored["x_zero_point"].dtype == np.int8 else 255) - zero)


whole, cut = top_of_range(5), top_of_range(5, CalibMaxIntermediateOutputs=2)
try:
    top_of_range(4, CalibMaxIntermediateOutputs=2)
    even = "a range"
except ValueError as error:
    even = str(error)
print(f"seen: the range ends at {whole:.0f} without the option and at {cut:.0f} with it; of four batches: {even}")
assert round(whole) == 50 and round(cut) == 10 and even == "No data is collected."
PY
