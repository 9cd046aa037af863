"""A commit as a folder that transformers loads: weights, config, tokenizer, and a proof that both agree."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from orchestrator.errors import InputError
from orchestrator.rundir import RunDir
from orchestrator.spec import JobSpec, parse

if TYPE_CHECKING:
    from torch import Tensor

    from orchestrator.checkpoint.reader import Reader
    from orchestrator.data.tokens import Tokens
    from workloads.workload import Workload

TOLERANCE = 1e-3
"""Largest difference of logits, in fp32, between this model and what transformers loads from the export."""
SAMPLE_TOKENS = 120


def export(run_uri: str, step: int, target: str) -> dict[str, Any]:
    """Write the commit at `step` of a run to the folder `target`, checked and whole or not at all.

    Returns {"uri", "step", "logits_difference", "sample"}; `sample` is generated text, None where the model
    generates none. Raises InputError if there is no such commit, and RuntimeError if transformers disagrees.
    """
    import yaml

    from orchestrator import assemble
    from orchestrator.checkpoint.store import Store
    from orchestrator.data.tokens import Tokens

    run = RunDir(run_uri)
    text = run.read_text("job.yaml")
    if text is None:
        raise InputError("there is no run here", run.uri, "give a run directory")
    spec = parse(yaml.safe_load(text), run.at("job.yaml"))
    store = Store(run.at("checkpoints"))
    manifest = store.manifest(step)
    tokens = Tokens.open(manifest.meta["data"])
    workload, reader = assemble.workload_of(spec, tokens), store.reader(manifest)
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        workload.to_hf(lambda name: reader.read(f"model.{name}"), folder)
        _write_tokenizer(tokens, spec, folder)
        difference = _compare(spec, tokens, workload, reader, folder)
        facts = {"step": step, "receipt": manifest.receipt, "run": spec.name, "logits_difference": difference}
        (Path(folder) / "export.json").write_text(json.dumps(facts, indent=2) + "\n")
        sample = _sample(tokens, folder)
        _publish(folder, target)
    return {"uri": target, "step": step, "logits_difference": difference, "sample": sample}


def _write_tokenizer(tokens: Tokens, spec: JobSpec, folder: str) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer, roles = tokens.tokenizer(), tokens.manifest.roles
    named = {f"{role}_token": tokenizer.id_to_token(number) for role, number in roles.items()}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=spec.data.sequence_length, **named
    )
    wrapped.save_pretrained(folder)


def _model(folder: str) -> Any:
    """The exported model by the class that its own config names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(folder).eval()


def _compare(spec: JobSpec, tokens: Tokens, workload: Workload, reader: Reader, folder: str) -> float:
    """Largest difference of logits on real text between our model and the exported one."""
    import torch

    with torch.device("meta"):
        model = workload.build()
    model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            tensor.copy_(reader.read(f"model.{name}"))
        length = min(spec.data.sequence_length, 64)
        source = max(range(tokens.sources), key=tokens.length)
        window = torch.from_numpy(tokens.window(source, 0, min(length, tokens.length(source))))[None]
        ours, theirs = _logits(model, window), _model_logits(_model(folder), window)
    difference = float((ours - theirs).abs().max())
    if not difference <= TOLERANCE:
        raise RuntimeError(f"the exported model's logits differ by {difference:.2e}; nothing was published")
    return difference


def _logits(model: Any, window: Tensor) -> Tensor:
    batch = {"tokens": window}
    return model(batch).logits


def _model_logits(model: Any, window: Tensor) -> Tensor:
    return model(input_ids=window).logits


def _sample(tokens: Tokens, folder: str) -> str | None:
    """Text that the exported model goes on with, from the first words of the corpus; None if it generates none."""
    import torch

    model = _model(folder)
    if not model.can_generate() or model.config.is_encoder_decoder:
        return None
    tokenizer = tokens.tokenizer()
    source = max(range(tokens.sources), key=tokens.length)
    prompt = torch.from_numpy(tokens.window(source, 0, 8))[None]
    torch.manual_seed(0)
    room = getattr(model.config, "max_position_embeddings", 512) - prompt.shape[1]
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(SAMPLE_TOKENS, room),
        do_sample=True,
        temperature=0.8,
        top_k=50,
        pad_token_id=tokens.manifest.roles["eos"],
    )
    return tokenizer.decode(made[0].tolist())


def _publish(folder: str, target: str) -> None:
    """Put the finished folder in place. On an object store, export.json goes last and says that all is there."""
    fs, path = fsspec.core.url_to_fs(target)
    if not isinstance(fs, LocalFileSystem):
        names = sorted(os.listdir(folder), key=lambda name: name == "export.json")
        for name in names:
            fs.put_file(os.path.join(folder, name), f"{path}/{name}")
        return
    draft, old = f"{path}.{os.getpid()}.tmp", f"{path}.{os.getpid()}.old"
    shutil.copytree(folder, draft)
    if os.path.exists(path):
        os.replace(path, old)
    os.replace(draft, path)
    shutil.rmtree(old, ignore_errors=True)
