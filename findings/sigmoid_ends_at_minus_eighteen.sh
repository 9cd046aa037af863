#!/usr/bin/env bash
# onnxruntime's sigmoid is exactly 0 below -18, so its logarithm is minus infinity there.
#
# Guess: in float32, Log(Sigmoid(x)) is x to seven digits from about -15 down to -88, where exp leaves the range. A runtime
#   may differ in the last digit.
# Behaviour: the kernel for CPUs is a quotient of polynomials, whose error is small beside 1 and not beside the result. At
#   -17 the sigmoid is twice as large as it should be, and log gives -16.2; from -18 on it is 0, and log gives minus
#   infinity. The reference implementation of ONNX gives -17 and -18.
# Packages: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6
# Why it matters: torch's exporter writes logsigmoid as these two operators (onnxscript 0.7.2). A log-likelihood from an
#   export is then minus infinity where the model that was trained has -20, and a sure wrong answer has an infinite loss.
#   Rare events cannot be ranked: below one in a hundred million all have probability 0.
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

np.seterr(divide="ignore")
nodes = [helper.make_node("Sigmoid", ["x"], ["p"]), helper.make_node("Log", ["p"], ["log"])]
inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])]
outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("p", "log")]
graph = helper.make_graph(nodes, "sigmoid", inputs, outputs)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
onnx.checker.check_model(model, full_check=True)

x = np.array([-5, -10, -13, -15, -17, -18.5, -20, -30], np.float32)
exact = -np.log1p(np.exp(-x.astype(np.float64)))
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
probability, log = session.run(None, {"x": x})
_, reference = ReferenceEvaluator(model).run(None, {"x": x})
print("version: onnxruntime", onnxruntime.__version__)
print("guess: log(sigmoid(x)) is x, to seven digits, from -15 to -30")
print("seen: x            ", [f"{value:.2f}" for value in x])
print("seen: log, here    ", [f"{value:.2f}" for value in log])
print("seen: log, in ONNX ", [f"{value:.2f}" for value in reference])
assert np.allclose(reference, exact, rtol=1e-6)
assert np.allclose(log[:2], exact[:2], rtol=1e-3)
assert 0.1 < log[3] - exact[3] < 0.3 and 0.5 < log[4] - exact[4] < 1
assert (probability[5:] == 0).all() and np.isneginf(log[5:]).all()
PY
