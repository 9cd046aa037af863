#!/usr/bin/env bash
# onnxruntime's maximum is NaN if the first number is one, and passes over a NaN anywhere else.
#
# Guess: a NaN makes the maximum of a row NaN, as in torch, NumPy and the reference implementation of ONNX, wherever in
#   the row it stands.
# Behaviour: ReduceMax, MaxPool and ArgMax compare numbers, and no number is larger than NaN or smaller. In ReduceMax and
#   ArgMax a NaN that comes first stays, and one that comes later is lost; in pooling it depends on where it stands. Beside
#   a NaN the result need not even be the largest number: here the maximum of 0 to 7 with a NaN in second place is 6.
# Packages: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6
# Why it matters: pooling hides a NaN that training would have shown, so an export whose layer overflows answers with
#   numbers. A check of the form "is the maximum finite", which covers a tensor at the cost of one number, passes. That
#   another number than the largest comes out is seen by nobody.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6

venv/bin/python - <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

LENGTH = 8


def model(operator, shape, result, **attributes):
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    kind = TensorProto.INT64 if operator == "ArgMax" else TensorProto.FLOAT
    outputs = [helper.make_tensor_value_info("y", kind, result)]
    graph = helper.make_graph([node], "maximum", inputs, outputs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    return made


def maxima(made, shape):
    """The result for a NaN in first, second and last place of 0 to 7, in onnxruntime and in the reference."""
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    results = []
    for place in (0, 1, LENGTH - 1):
        x = np.arange(LENGTH, dtype=np.float32)
        x[place] = np.nan
        x = x.reshape(shape)
        both = session.run(None, {"x": x})[0], ReferenceEvaluator(made).run(None, {"x": x})[0]
        results.append(tuple(np.asarray(value).item() for value in both))
    return results


print("version: onnxruntime", onnxruntime.__version__)
print("guess: NaN wherever it stands, and its place from ArgMax, as the second of each pair has it")
row, pool = (1, LENGTH), (1, 1, LENGTH)
reduced = maxima(model("ReduceMax", row, [1], axes=[1], keepdims=0), row)
argument = maxima(model("ArgMax", row, [1], axis=1, keepdims=0), row)
pooled = maxima(model("GlobalMaxPool", pool, [1, 1, 1]), pool)
for name, results in (("ReduceMax", reduced), ("ArgMax", argument), ("GlobalMaxPool", pooled)):
    print(f"seen: {name} with a NaN in first, second and last place: {results}")
assert np.isnan(reduced[0][0]) and not np.isnan([reduced[1][0], reduced[2][0]]).any()
assert all(np.isnan(reference) for _, reference in reduced)
assert [ours for ours, _ in argument] == [0, 7, 6] and [reference for _, reference in argument] == [0, 1, 7]
assert not np.isnan([ours for ours, _ in pooled]).all() and all(np.isnan(reference) for _, reference in pooled)
PY
