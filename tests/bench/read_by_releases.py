"""Quantised exports, read by older and newer releases of their libraries, each in an environment of its own.

    python tests/bench/read_by_releases.py [folder for the environments]

Writes, by the versions of this environment, a small decoder in int4, int8 and mixed bits in compressed-tensors' form,
and an encoder in int8 as ONNX. Each release in READERS computes its outputs on the same tokens. They must be those of
our own model with fake quantisation within 1e-5, as a share of the largest number. Prints a row for each release and
export, and exits with 1 if one disagrees. uv makes the environments; with a folder they are kept for the next time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import paths  # noqa: F401
import torch
from environments import made_by_uv
from traced_cases import vocabulary_of

from orchestrator.export.quantised import schemes_by_name
from orchestrator.extensions.compressed_tensors.write import export_compressed
from orchestrator.extensions.onnx.write import export_onnx
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.fake_quantise import quantised_layers
from workloads.model.scheme import Scheme

TORCH = f"torch=={metadata.version('torch').partition('+')[0]}"
SIZES = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128}
SCHEMES = {
    "int4": Scheme("int4", 32),
    "int8": Scheme("int8", 0),
    "mixed": Scheme("int4", 32, int8=("*.attention.*",)),
}
READERS: dict[str, list[list[str]]] = {
    "compressed-tensors": [
        ["compressed-tensors==0.12.2", "transformers==4.57.6", "accelerate", TORCH],
        ["compressed-tensors==0.17.0", "transformers==5.23.0", "accelerate", TORCH],
        ["compressed-tensors==0.20.1", "transformers==5.24.0", "accelerate", TORCH],
    ],
    "onnx": [["onnxruntime==1.20.1"], ["onnxruntime==1.26.0"], ["onnxruntime==1.32.0"]],
}
"""What is installed for each reader of a form. compressed-tensors and transformers of this environment lie between."""
READ = {
    "compressed-tensors": """
import sys, numpy, torch, transformers
tokens = torch.from_numpy(numpy.load(sys.argv[1]))
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder + "/out", dtype=torch.float32).eval()
    with torch.no_grad():
        numpy.save(folder + "/read.npy", model(tokens).logits.numpy())
""",
    "onnx": """
import sys, numpy, onnxruntime
tokens = numpy.load(sys.argv[1])
given = {"input_ids": tokens, "attention_mask": numpy.ones_like(tokens), "token_type_ids": numpy.zeros_like(tokens)}
for folder in sys.argv[2:]:
    session = onnxruntime.InferenceSession(folder + "/out/model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {each.name: given[each.name] for each in session.get_inputs()})
    numpy.save(folder + "/read.npy", found)
""",
}
"""Computes the outputs of the exports in several folders on the tokens in a file."""
NEAR = 1e-5


def write(folder: Path, form: str, scheme: Scheme, tokens: np.ndarray) -> None:
    """Write an export to folder/out, and what our model computes to folder/wanted.npy."""
    model, objective = ("llama-tiny", "causal_lm") if form != "onnx" else ("bert-tiny", "masked_lm")
    workload = load(model, objective, vocabulary_of(192), changes=SIZES, sequence_length=16)
    plain, out = folder / "plain", folder / "out"
    for each in (plain, out):
        each.mkdir(parents=True)

    def read(name: str) -> torch.Tensor:
        return workload.initial(name, 3) * (4 if name.endswith("weight") else 1)

    workload.to_hf(read, str(plain))
    with torch.device("meta"):
        layers = quantised_layers(blank := workload.build(), workload.blocks(blank), scheme)
    chosen = schemes_by_name(scheme, workload.hf_weights([*layers]))
    if form == "onnx":
        export_onnx(str(plain), str(out), chosen)
    else:
        export_compressed(str(plain), str(out), chosen)
    ours = with_weights(workload, read, scheme=scheme)
    with torch.no_grad():
        np.save(folder / "wanted.npy", ours({"tokens": torch.from_numpy(tokens)}).logits.numpy())


def environment(folder: Path, packages: list[str]) -> str:
    """Return the Python of an environment with these packages, made if it is not there."""
    path = folder / "-".join(each.replace("==", "-") for each in packages)
    return made_by_uv(path, ["numpy", *packages])


def main(kept: str | None) -> int:
    """Return 0 if every release reads every export as our model computes."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="releases-") as scratch:
        work = Path(scratch)
        environments = Path(kept) if kept else work / "environments"
        tokens = (np.arange(48).reshape(3, 16) * 7 + 11) % 180 + 6
        np.save(work / "tokens.npy", tokens)
        for form, releases in READERS.items():
            schemes = SCHEMES if form != "onnx" else {"int8": Scheme("int8", 0)}
            for name, scheme in schemes.items():
                write(work / form / name, form, scheme, tokens)
            for packages in releases:
                python = environment(environments, packages)
                folders = {name: work / form / name for name in schemes}
                for folder in folders.values():
                    (folder / "read.npy").unlink(missing_ok=True)
                command = [python, "-c", READ[form], str(work / "tokens.npy"), *map(str, folders.values())]
                done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
                for name, folder in folders.items():
                    row: dict[str, Any] = {"form": form, "numbers": name, "reader": packages}
                    if (folder / "read.npy").exists():
                        wanted, found = np.load(folder / "wanted.npy"), np.load(folder / "read.npy")
                        row |= {"difference": float(abs(found - wanted).max() / abs(wanted).max())}
                    else:
                        row |= {"failed": done.stderr.strip().splitlines()[-1:]}
                    wrong += not row.get("difference", np.inf) <= NEAR
                    print(json.dumps(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [None]))
