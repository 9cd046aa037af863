"""Export an own model with its code to a folder that transformers loads with `trust_remote_code=True`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.data.config import DataSpec
from orchestrator.export.tokenizer import write_tokenizer
from orchestrator.planner.trace.sample_batch import sample_batch
from workloads.errors import WorkloadError
from workloads.own import for_transformers
from workloads.own.flat_code import SUFFIX, FlatCode, flat_code
from workloads.own.generate import logits_of
from workloads.own.model import OwnModel, OwnWorkload

if TYPE_CHECKING:
    from torch import Tensor

    from orchestrator.data.store.tokens import Tokens
    from workloads.workload import Batch

CODE = "modeling_own"
PROBED = 64
"""The most tokens of a sample on which outputs are compared."""
SECONDS = 300
"""How long loading the folder in another process may take."""
PLACE = "Network: Any = None  # the export writes the import of the model's class here"
FILES = "    ...  # the export writes the imports of further files here, which transformers then copies"


def write_code(config: OwnModel, roles: Mapping[str, int], folder: Path) -> FlatCode:
    """Write config.json and the code of an own model. Raises WorkloadError if the code cannot travel."""
    flat = flat_code(config.reference)
    if CODE in flat.files:
        raise WorkloadError(f"a module is called {CODE}, as a file of the export is; rename it")
    for name, text in flat.files.items():
        (folder / f"{name}{SUFFIX}").write_text(text, encoding="utf-8")
    source = Path(for_transformers.__file__).read_text(encoding="utf-8")
    kind = config.reference.partition(":")[2]
    others = [f"    from .{name} import __name__" for name in flat.files if name != flat.module]
    source = source.replace(PLACE, f"from .{flat.module} import {kind} as Network")
    source = source.replace(FILES, "\n".join(others) or FILES)
    (folder / f"{CODE}{SUFFIX}").write_text(source, encoding="utf-8")
    speaks = logits_of(config.bare) is not None
    classes = {"AutoConfig": "OwnConfig", "AutoModel": "OwnModel"}
    if speaks:
        classes["AutoModelForCausalLM"] = "OwnForCausalLM"
    about: dict[str, Any] = {
        "architectures": [list(classes.values())[-1]],
        "auto_map": {auto: f"{CODE}.{name}" for auto, name in classes.items()},
        "model_type": "own",
        "options": json.loads(config.options),
        "vocab_size": config.vocab_size,
        "dtype": "float32",
        "use_cache": False,
        "tie_word_embeddings": True,  # as the constructor ties them
        **{f"{role}_token_id": roles[role] for role in ("bos", "eos", "pad") if role in roles},
    }
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    return flat


def write_own_tokenizer(data: DataSpec, tokens: Tokens, workload: OwnWorkload, folder: str) -> None:
    """Write the tokenizer and the settings of generation, if the model reads text."""
    if data.samples is not None:
        return
    write_tokenizer(tokens, workload, data, folder)
    eos = tokens.manifest.roles["eos"]
    settings = {
        "eos_token_id": [eos, *(end for end in workload.generation.ends if end != eos)],
        "pad_token_id": tokens.manifest.roles.get("pad", eos),
        "use_cache": False,
    }
    (Path(folder) / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def check_folder(
    data: DataSpec,
    seed: int,
    tokens: Tokens,
    workload: OwnWorkload,
    read: Callable[[str], Tensor],
    folder: str,
    needs: tuple[str, ...],
) -> float:
    """Load an export of an own model in a process that has neither this project nor the user's folder.

    Args:
        data: the key `data` of the job.
        seed: the seed of the run.
        tokens: the prepared data.
        workload: the model and its objective.
        read: returns a tensor of the commit by its name.
        folder: the local folder of the export.
        needs: names of installed packages that the exported code imports.

    Returns:
        The largest difference of losses and logits there to those here.

    Raises:
        RuntimeError: the folder does not load, or the difference is too large.
    """
    from safetensors.torch import save_file

    from workloads.hf.check.compare import TOLERANCE

    batch = _probe(data, seed, workload, tokens)
    with tempfile.TemporaryDirectory(prefix="own-") as temporary:
        probe_tensors = {f"batch.{name}": value.contiguous() for name, value in batch.items()}
        probe_tensors |= {name: value.contiguous() for name, value in _outputs(workload, read, batch).items()}
        probe = f"{temporary}/probe.safetensors"
        save_file(probe_tensors, probe)
        reader = Path(__file__).with_name("read_own_folder.py")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(reader), str(Path(folder).resolve()), probe, ",".join(needs)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                cwd=temporary,
                env=environment | {"HF_MODULES_CACHE": f"{temporary}/modules", "HF_HUB_OFFLINE": "1"},
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the exported folder did not load within {SECONDS} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"the exported folder does not load without this project's folder: {last}")
    result = float(done.stdout.split()[-1])
    if not result <= TOLERANCE:
        raise RuntimeError(f"the exported model's outputs differ by {result:.2e}; nothing was published")
    return result


def _probe(data: DataSpec, seed: int, workload: OwnWorkload, tokens: Tokens) -> Batch:
    """Return a batch as training has it, of the first samples or of made-up text."""
    if data.samples is not None:
        from orchestrator.data.samples.own_samples import first_samples

        return first_samples(data.samples, seed, with_set_values=True, prepared=tokens.folder.uri)
    length = min(data.sequence_length, PROBED)
    short = data.model_copy(update={"sequence_length": length})
    try:
        cut = replace(workload, objective=replace(workload.objective, sequence_length=length))  # type: ignore[type-var]
        return sample_batch(short, seed, False, cut, 2)
    except WorkloadError:  # some objectives need their full length
        return sample_batch(data, seed, False, workload, 2)


def _outputs(workload: OwnWorkload, read: Callable[[str], Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return the losses of a batch, and the logits of its tokens if the model gives them."""
    from workloads.inference import with_weights
    from workloads.own.generate import of_tokens

    model: Any = with_weights(workload, read).eval()
    result = {}
    with torch.inference_mode():
        result["losses"] = model(batch).losses
        if (logits := logits_of(model.network)) and "tokens" in batch:
            result["logits"] = logits(of_tokens(batch["tokens"]))
    return result
