"""A commit as a folder that transformers loads: weights, config, tokenizer, and a proof that both agree."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from orchestrator.errors import InputError
from orchestrator.export_tokenizer import write_tokenizer
from orchestrator.rundir import RunDir
from orchestrator.spec import JobSpec, parse

if TYPE_CHECKING:
    from torch import Tensor

    from orchestrator.data.tokens import Tokens
    from workloads.workload import Batch, Workload

COMPARED, SHORT = 64, 7
"""Tokens of the longest and of the shortest sequence on which an export is compared."""
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

    check_target(target)
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
        difference = write(spec, tokens, workload, lambda name: reader.read(f"model.{name}"), folder)
        facts = {"step": step, "receipt": manifest.receipt, "run": spec.name, "logits_difference": difference}
        (Path(folder) / "export.json").write_text(json.dumps(facts, indent=2) + "\n")
        _publish(folder, target)
        sample = _sample(tokens, folder)
    return {"uri": target, "step": step, "logits_difference": difference, "sample": sample}


def write(
    spec: JobSpec, tokens: Tokens, workload: Workload, read: Callable[[str], Tensor], folder: str
) -> float:
    """Write model and tokenizer to the local `folder`; `read` gives a tensor. Returns how far transformers is from us.

    Raises RuntimeError if that is too far.
    """
    workload.to_hf(read, folder)
    write_tokenizer(tokens, workload, spec, folder)
    return _compare(spec, tokens, workload, read, folder)


def check_target(target: str) -> None:
    """Refuse to write over what is no export. Raises InputError."""
    fs, path = fsspec.core.url_to_fs(target)
    if not isinstance(fs, LocalFileSystem) or not os.path.lexists(path):
        return
    if not os.path.isdir(path) or (os.listdir(path) and not os.path.exists(f"{path}/export.json")):
        raise InputError("holds something that is no export", target, "give a new folder")


def _compare(
    spec: JobSpec, tokens: Tokens, workload: Workload, read: Callable[[str], Tensor], folder: str
) -> float:
    """Largest difference between our model and the exported one on real text: see `workloads.hf.compare`."""
    import torch

    from workloads.hf.compare import TOLERANCE, difference

    with torch.device("meta"):
        model = workload.build()
    model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            if name in workload.shapes:
                tensor.copy_(read(name))
    found = difference(workload.config, model, folder, batches(spec, tokens, workload))
    if not found <= TOLERANCE:
        raise RuntimeError(f"the exported model's outputs differ by {found:.2e}; nothing was published")
    return found


def batches(spec: JobSpec, tokens: Tokens, workload: Workload) -> Iterator[Batch]:
    """What both models are asked: a batch of the objective, and text at several lengths, whole and padded."""
    import torch

    from workloads.errors import WorkloadError
    from workloads.hf.compare import probes
    from workloads.objectives.samples import Samples

    length, objective = min(spec.data.sequence_length, COMPARED), workload.objective
    with contextlib.suppress(WorkloadError):  # some recipes need their whole length
        objective = replace(objective, sequence_length=length)  # type: ignore[type-var]
    window = objective.window(objective.sequence_length)  # type: ignore[attr-defined]
    source = max(range(tokens.sources), key=tokens.length)
    text = tokens.window(source, 0, min(4 * max(window, length), tokens.length(source)))
    read = Samples(lambda i: np.resize(np.roll(text, -i * window), window), 2)
    yield objective.collate(read, [0, 1], 0)
    lengths = (length, length // 2 + 1, SHORT)
    yield from probes(workload.config, workload.vocabulary, torch.from_numpy(text), lengths)


def _sample(tokens: Tokens, folder: str) -> str | None:
    """Text that the exported model goes on with, from the first words of the corpus; None if it generates none."""
    import torch

    from workloads.hf.compare import load

    model = load(folder, strict=False)
    source = max(range(tokens.sources), key=tokens.length)
    prompt = torch.from_numpy(tokens.window(source, 0, min(8, tokens.length(source))))[None]
    room = getattr(model.config, "max_position_embeddings", 512) - prompt.shape[1]
    if not model.can_generate() or model.config.is_encoder_decoder or room < 1:
        return None
    torch.manual_seed(0)
    try:
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(SAMPLE_TOKENS, room),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokens.manifest.roles["eos"],
        )
    except (RuntimeError, ValueError):  # a broken model has probabilities that cannot be drawn from
        return None
    return tokens.tokenizer().decode(made[0].tolist())


def _files(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def _last(name: str) -> bool:
    return name == "export.json"


def _open_to_others(folder: str) -> None:
    """Modes as of any new folder under the user's umask, where a temporary one is its owner's alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (Path(folder), *Path(folder).rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _publish(folder: str, target: str) -> None:
    """Put the finished folder in place. On an object store, export.json goes last and says that all is there."""
    fs, path = fsspec.core.url_to_fs(target)
    if not isinstance(fs, LocalFileSystem):
        names = sorted((file.relative_to(folder).as_posix() for file in _files(folder)), key=_last)
        if fs.exists(f"{path}/export.json"):
            fs.rm_file(f"{path}/export.json")  # else the old mark would stand over half-new files
        for name in names:
            fs.put_file(os.path.join(folder, name), f"{path}/{name}")
        return
    draft, old = f"{path}.{os.getpid()}.tmp", f"{path}.{os.getpid()}.old"
    try:
        shutil.copytree(folder, draft, copy_function=shutil.copyfile)
        _open_to_others(draft)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", target, "give another folder") from None
    if os.path.exists(path):
        os.replace(path, old)
    os.replace(draft, path)
    shutil.rmtree(old, ignore_errors=True)
