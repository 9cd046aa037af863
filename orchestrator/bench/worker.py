"""The process of one export: it loads the model in its own runtime, and answers requests to measure it.

    python -m orchestrator.bench.worker FOLDER RUNTIME INPUTS THREADS

Requests and replies are JSON objects, one per line. It imports nothing but numpy and the runtime, so that its resident
memory is what serving this export takes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100
"""The label of a token that is not predicted."""
Run = Callable[[np.ndarray, np.ndarray, "np.ndarray | None"], np.ndarray]
"""Returns the logits, fp32 [B, classes] or [B, L, classes], of tokens, mask and token types, each [B, L]."""


def main() -> None:
    """Load the model, and answer until the input ends."""
    folder, runtime, inputs, threads = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for a reply
    try:
        _serve(folder, runtime, inputs, int(threads), replies)
    except Exception as error:  # whatever a runtime raises becomes one line in the parent
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def _serve(folder: str, runtime: str, inputs: str, threads: int, replies: Any) -> None:
    from safetensors.numpy import load_file

    started = time.perf_counter()
    run = (_onnx if runtime == "onnxruntime" else _transformers)(folder, threads)
    seconds = time.perf_counter() - started
    arrays = load_file(inputs)
    run(*_rows(arrays, 0, 1))
    replies.write(json.dumps({"seconds": seconds, "memory": _resident_bytes()}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        rows = range(request["first"], request["first"] + request["count"])
        reply = (
            _timed(run, arrays, rows, request["passes"])
            if "passes" in request
            else _scored(run, arrays, rows)
        )
        replies.write(json.dumps(reply) + "\n")


def _rows(
    arrays: dict[str, np.ndarray], first: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return tokens, mask and token types of samples, cut to the longest of them. Numbers wrap around."""
    numbers = np.arange(first, first + count) % len(arrays["tokens"])
    mask = arrays["mask"][numbers]
    longest = max(1, int(np.flatnonzero(mask.any(0)).max(initial=0)) + 1)
    types = arrays.get("token_types")
    tokens = arrays["tokens"][numbers, :longest]
    return tokens, mask[:, :longest], None if types is None else types[numbers, :longest]


def _timed(run: Run, arrays: dict[str, np.ndarray], rows: range, passes: int) -> dict[str, Any]:
    """Return the seconds of each forward pass over the rows, and how many tokens they have without padding."""
    batch = _rows(arrays, rows.start, len(rows))
    seconds = []
    for _ in range(passes):
        started = time.perf_counter()
        run(*batch)
        seconds.append(time.perf_counter() - started)
    return {"pass_seconds": seconds, "tokens": int(batch[1].sum())}


def _scored(run: Run, arrays: dict[str, np.ndarray], rows: range) -> dict[str, Any]:
    """Return the summed loss in nats, and the predictions of classes or the counts of tokens."""
    batch = _rows(arrays, rows.start, len(rows))
    logits = run(*batch).astype(np.float64)
    if "classes" in arrays:
        wanted = arrays["classes"][rows.start : rows.stop]
    else:
        wanted = arrays["labels"][rows.start : rows.stop, : logits.shape[1]]
        logits, wanted = logits[wanted != IGNORED], wanted[wanted != IGNORED]
    logits -= logits.max(-1, keepdims=True)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, wanted[:, None], -1)[:, 0]
    predicted = logits.argmax(-1)
    reply: dict[str, Any] = {
        "loss": float(losses.sum()),
        "count": len(wanted),
        "correct": int((predicted == wanted).sum()),
    }
    if "classes" in arrays:
        reply["predictions"] = predicted.tolist()
    return reply


def _transformers(folder: str, threads: int) -> Run:
    import inspect

    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    config = json.loads((Path(folder) / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters

    def run(tokens: np.ndarray, mask: np.ndarray, types: np.ndarray | None) -> np.ndarray:
        model_inputs = {
            "input_ids": torch.from_numpy(tokens),
            "attention_mask": torch.from_numpy(mask).long(),
        }
        if types is not None and takes_types:
            model_inputs["token_type_ids"] = torch.from_numpy(types)
        with torch.inference_mode():
            result: np.ndarray = model(**model_inputs).logits.float().numpy()
        return result

    return run


def _onnx(folder: str, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    path = str(Path(folder) / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = {model_input.name for model_input in session.get_inputs()}

    def run(tokens: np.ndarray, mask: np.ndarray, types: np.ndarray | None) -> np.ndarray:
        model_inputs = {"input_ids": tokens, "attention_mask": mask.astype(np.int64)}
        if "token_type_ids" in names:
            model_inputs["token_type_ids"] = np.zeros_like(tokens) if types is None else types
        result: np.ndarray = session.run(["logits"], model_inputs)[0]
        return result

    return run


def _resident_bytes() -> int:
    """Return this process's resident memory; 0 where the system does not tell."""
    try:
        match = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


if __name__ == "__main__":
    main()
