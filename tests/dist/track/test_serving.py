"""A smoke of serving: an export answers through MLflow's scoring server, onnxruntime and llama.cpp as it does here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from jobs import job, write_text
from local_run import LocalGang, drive_here
from tokenizers import Tokenizer

from orchestrator.export.converted import Conversion
from orchestrator.export.hugging_face import export
from orchestrator.observe.registry import write_flavor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4
BERT = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128}
TEXTS = ["Number seven is a long line of words.", "short", "another line, of the middle length"]
UP = 300.0
"""Seconds that a server may take to begin, on a busy machine."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def classifier(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small classifier of lines."""
    folder = tmp_path_factory.mktemp("run")
    lines = [line for line in Path(text).read_text().splitlines() if len(line) > 10][:80]
    rows = [{"text": line, "label": "long" if len(line) > 50 else "short"} for line in lines]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = job(str(folder / "rows.jsonl"), steps=STEPS, optimizer={"lr": 3e-3, "warmup": 0})
    asked["workload"] = {"model": "bert-tiny", "changes": BERT, "objective": "sequence_classification"}
    asked["data"] |= {"labels": ["short", "long"]}
    asked["data"]["sources"][0]["field"] = {"text": "text", "label": "label"}
    drive_here(asked, str(folder / "run"), folder / "cache", gang=lambda: LocalGang([1]))
    return folder / "run"


def expected(folder: Path) -> list[dict[str, Any]]:
    """What transformers' own pipeline answers with an export."""
    return list(transformers.pipeline("text-classification", model=str(folder), device="cpu")(TEXTS))


def test_an_export_answers_through_mlflows_scoring_server(classifier: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    export(str(classifier), STEPS, str(target))
    wanted = expected(target)
    assert write_flavor(
        str(target), str(tmp_path / "flavor")
    )  # what a registered version has beside the export
    for path in sorted((tmp_path / "flavor").rglob("*")):
        if path.is_file():
            place = target / path.relative_to(tmp_path / "flavor")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(target), "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of uvicorn, which MLflow starts
    environment = {**os.environ, "PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until_up(server, f"http://127.0.0.1:{port}/ping", tmp_path / "server.log")
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations",
            json.dumps({"inputs": TEXTS}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            said = json.loads(answer.read())["predictions"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert [each["label"] for each in said] == [each["label"] for each in wanted]
    assert [each["score"] for each in said] == pytest.approx([each["score"] for each in wanted], abs=1e-6)


def until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server answers. Raises AssertionError with its log if it ends before, or takes too long."""
    deadline = time.monotonic() + UP
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if urllib.request.urlopen(url, timeout=5).status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server is not up: {log.read_text()[-2000:]}")


def test_an_int8_export_answers_through_onnxruntime(classifier: Path, tmp_path: Path) -> None:
    """Its probabilities are those of the model in full precision, but for what rounding makes of them."""
    export(str(classifier), STEPS, str(tmp_path / "hf"))
    told = export(str(classifier), STEPS, str(tmp_path / "onnx"), form=Conversion("onnx", numbers="int8"))
    session = onnxruntime.InferenceSession(
        tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "onnx" / "tokenizer.json"))
    names = {given.name for given in session.get_inputs()}
    labels = json.loads((tmp_path / "onnx" / "config.json").read_text())["id2label"]
    apart = []
    for one, wanted in zip(TEXTS, expected(tmp_path / "hf"), strict=True):
        ids = np.array([tokenizer.encode(one).ids], dtype=np.int64)
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        (logits,) = session.run(["logits"], {name: given[name] for name in names})
        chances = np.exp(logits[0]) / np.exp(logits[0]).sum()
        assert labels[str(int(chances.argmax()))] == wanted["label"]
        apart.append(abs(float(chances.max()) - wanted["score"]))
    assert 0 < max(apart) < 0.05
    assert told["rounding"] > 0


def test_a_gguf_export_answers_through_llama_cpp(text: str, tmp_path: Path) -> None:
    """The log-probability of each token that it writes is what transformers computes with the same file. llama.cpp
    rounds what it multiplies by q8_0 weights as well, hence the bound."""
    import xllamacpp

    asked = job(text, steps=STEPS, optimizer={"lr": 3e-3, "warmup": 0})
    asked["workload"] = {"model": "llama-tiny", "changes": BERT | {"kv_heads": 2}}
    drive_here(asked, str(tmp_path / "run"), tmp_path / "cache", gang=lambda: LocalGang([1]))
    export(str(tmp_path / "run"), STEPS, str(tmp_path / "gguf"), form=Conversion("gguf", numbers="q8_0"))
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(tmp_path / "gguf" / "model.gguf")
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 128, 1, False
    parameters.cpuparams.n_threads = 1
    prompt = list(range(5, 25))
    answer = xllamacpp.Server(parameters).handle_completions(
        {"prompt": prompt, "max_tokens": 12, "temperature": 0, "n_probs": 1, "ignore_eos": True}
    )
    written = answer["choices"][0]["logprobs"]["content"]
    tokens = [each["id"] for each in written]
    assert len(tokens) == 12
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "gguf", gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chances = logits.log_softmax(-1)
    wanted = chances[torch.arange(len(tokens)), tokens].tolist()
    assert [each["logprob"] for each in written] == pytest.approx(wanted, abs=0.02)
    assert tokens[0] == int(chances[0].argmax())
