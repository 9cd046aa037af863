"""Write an adapter of our model as a folder that peft loads onto a class of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from workloads.adapters.adapter import KEY, LENGTH, LOW_RANK, PROMPTS, VALUE, A, Adapter, B
from workloads.adapters.lora import EXPERTS_A
from workloads.adapters.prompt import prompt_vectors
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.workload import NETWORK, HuggingFaceWorkload
from workloads.hf.tables.convert import row_of, to_hf
from workloads.hf.tables.families import family_of
from workloads.hf.tables.family import Row
from workloads.transformer_workload import TransformerWorkload

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft's prefix of tensor names."""
TASKS = {
    "CausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
    "QuestionAnswering": "QUESTION_ANS",
    "ConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""peft's name of a task, by the end of the class's name. Other classes have none."""
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class _Layer:
    """A linear layer of the transformers class, and the layers of ours that it consists of."""

    module: str
    row: Row
    number: str

    @property
    def parts(self) -> list[str]:
        """Return the names of our layers."""
        return [name.replace("{n}", self.number).removesuffix(".weight") for name in self.row.names]


def check_adapter(workload: TransformerWorkload | HuggingFaceWorkload) -> None:
    """Raise WorkloadError if the adapter cannot be written for peft."""
    adapter = _adapter_of(workload)
    if adapter.kind not in (*LOW_RANK, "prefix", *PROMPTS):
        raise WorkloadError(f"peft has no {adapter.kind}; set checkpoint.export to hf")
    if isinstance(workload, HuggingFaceWorkload):
        return
    if any(name.endswith(EXPERTS_A) for name in workload.shapes):
        raise WorkloadError(
            "stacked experts are not written for peft; set checkpoint.export to hf, which merges them"
        )
    if any(row.theirs for row in family_of(workload.config).all_rows(workload.config)):
        raise WorkloadError(
            "peft adapts linear layers, and transformers' class has tensors by head; set checkpoint.export to hf"
        )
    if workload.config.generator:
        raise WorkloadError("peft adapts one network, and this model has two; set checkpoint.export to hf")
    blank = {name: torch.empty(shape, device="meta") for name, shape in workload.shapes.items()}
    if adapter.kind == "prefix" and _task(workload) is None:
        raise WorkloadError(
            "peft has no prefix for this class of transformers; set checkpoint.export to null"
        )
    if adapter.kind in PROMPTS and _task(workload) != "CAUSAL_LM":
        raise WorkloadError(
            "peft pools differently with prompt tuning, so this adapter cannot be exported; "
            "set checkpoint.export to null"
        )
    with torch.device("meta"):
        config_of(workload, "")
        _tensors(workload, blank.__getitem__)


def write_adapter(
    workload: TransformerWorkload | HuggingFaceWorkload, read: Read, folder: str, base: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    `base` is the name of the base. `read(name)` returns a tensor of our model.
    """
    target = Path(folder)
    if isinstance(workload, HuggingFaceWorkload):
        adapter_tensors = _tensors_of_class(workload, read)
        config = _config_of_class(workload, base)
    else:
        adapter_tensors = _tensors(workload, read)
        config = config_of(workload, base)
    tensors = {name: tensor.contiguous() for name, tensor in adapter_tensors.items()}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _config_of_class(workload: HuggingFaceWorkload, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json for a class that is run unchanged, whose layers are transformers'
    own.
    """
    adapter = _adapter_of(workload)
    end = len(A)
    modules = [n.removeprefix(NETWORK)[:-end] for n in workload.shapes if n.endswith(A)]
    return {
        "task_type": _task_of(type(workload.config.bare).__name__),
        "base_model_name_or_path": base,
        "modules_to_save": sorted(_new_modules(workload)) or None,
        "inference_mode": True,
        **_low_rank(adapter),
        "fan_in_fan_out": False,
        "target_modules": sorted(modules),
    }


def _new_modules(workload: HuggingFaceWorkload) -> set[str]:
    """Return the newly initialised modules. A head of several layers has its own name, because peft adds names
    itself.
    """
    new = workload.new
    heads = {name.partition(".")[0] for name in new}
    old = {
        n.removeprefix(NETWORK).partition(".")[0]
        for n in workload.shapes
        if n.removeprefix(NETWORK) not in new
    }
    return {
        name.rpartition(".")[0] if name.partition(".")[0] in heads & old else name.partition(".")[0]
        for name in new
    }


def _tensors_of_class(workload: HuggingFaceWorkload, read: Read) -> dict[str, Tensor]:
    ends = {A: ".lora_A.weight", B: ".lora_B.weight", LENGTH: ".lora_magnitude_vector"}
    tensors = {f"{PREFIX}{name}": read(f"{NETWORK}{name}") for name in workload.new}
    for name in workload.shapes:
        for ours, theirs in ends.items():
            if name.endswith(ours):
                tensors[f"{PREFIX}{name.removeprefix(NETWORK).removesuffix(ours)}{theirs}"] = read(name)
    return tensors


def _low_rank(adapter: Adapter) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": adapter.kind == "rslora",
        "use_dora": adapter.kind == "dora",
    }


def config_of(workload: TransformerWorkload, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    A transformers layer that combines several of ours gets their matrices stacked and the sum of their ranks, with an
    alpha that keeps the scale.
    """
    adapter = _adapter_of(workload)
    layers = list(_layers(workload))
    general = {
        "task_type": _task(workload),
        "base_model_name_or_path": base,
        "modules_to_save": sorted(_heads(workload)) or None,
        "inference_mode": True,
    }
    config = workload.config
    if adapter.kind in PROMPTS:
        return general | {
            "peft_type": "PROMPT_TUNING" if adapter.kind == "prompt" else "P_TUNING",
            "num_virtual_tokens": adapter.rank,
            "token_dim": config.embedding_size,
            "num_attention_heads": config.heads,
            "num_layers": config.layers,
            "num_transformer_submodules": 1,
            **({"encoder_hidden_size": config.embedding_size} if adapter.kind == "p_tuning" else {}),
        }
    if adapter.kind == "prefix":
        return general | {
            "peft_type": "PREFIX_TUNING",
            "num_virtual_tokens": adapter.rank,
            "token_dim": config.kv_heads * config.head_dim,
            "num_attention_heads": config.kv_heads,
            "num_layers": config.layers,
            "num_transformer_submodules": 1,
            "prefix_projection": False,
        }
    ranks = {layer.module: adapter.rank * len(_adapted(layer, workload.shapes)) for layer in layers}
    odd = {module: rank for module, rank in ranks.items() if rank != adapter.rank}
    return general | {
        **_low_rank(adapter),
        "fan_in_fan_out": any(layer.row.transposed for layer in layers),
        "target_modules": sorted(ranks),
        "rank_pattern": odd,
        "alpha_pattern": {module: _alpha(adapter, rank) for module, rank in odd.items()},
    }


def _task(workload: TransformerWorkload) -> str | None:
    return _task_of(family_of(workload.config).head(workload.config).kind)


def _task_of(kind: str) -> str | None:
    return next((task for end, task in TASKS.items() if kind.endswith(end)), None)


def _alpha(adapter: Adapter, rank: int) -> float:
    return adapter.scale * (rank**0.5 if adapter.kind == "rslora" else rank)


def _adapter_of(workload: TransformerWorkload | HuggingFaceWorkload) -> Adapter:
    if workload.adapter is None:
        raise WorkloadError("there is no adapter to write; set workload.adapter, or checkpoint.export to hf")
    return workload.adapter


def _layers(workload: TransformerWorkload) -> Iterator[_Layer]:
    """Return the transformers layers that have an adapter."""
    family = family_of(workload.config)
    layers = set()
    for name in workload.shapes:
        if not name.endswith(A):
            continue
        row, _, number = row_of(family, workload.config, name.removesuffix(A) + ".weight")
        module = row.hf_name.replace("{n}", number).removesuffix(".weight")
        if module not in layers:
            layers.add(module)
            yield _Layer(module, row, number)


def _adapted(layer: _Layer, names: Mapping[str, object]) -> list[str]:
    return [part for part in layer.parts if f"{part}{A}" in names]


def _heads(workload: TransformerWorkload) -> set[str]:
    """Return the transformers modules that are trained in full: heads that the base lacks."""
    family = family_of(workload.config)
    adapter = _adapter_of(workload)
    trained = [n for n in workload.shapes if n not in workload.frozen and not adapter.adds(n)]
    names = [row_of(family, workload.config, name)[0].hf_name for name in trained]
    return {name.rpartition(".")[0] for name in names}


def _tensors(workload: TransformerWorkload, read: Read) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    if _adapter_of(workload).kind == "prefix":
        names = [f"layers.{n}.attention{end}" for n in range(workload.config.layers) for end in (KEY, VALUE)]
        tensors["prompt_embeddings"] = torch.cat([read(name).t() for name in names], dim=1)
    if _adapter_of(workload).kind in PROMPTS:
        tensors["prompt_embeddings"] = prompt_vectors(read, _adapter_of(workload).kind == "p_tuning")
    for layer in _layers(workload):
        for leaf, tensor in _of_layer(layer, workload, read):
            tensors[f"{PREFIX}{layer.module}.{leaf}"] = tensor
    if heads := _heads(workload):
        shapes = {n: s for n, s in workload.shapes.items() if n not in workload.frozen}
        base_shapes = {n: s for n, s in shapes.items() if not _adapter_of(workload).adds(n)}
        for name, tensor in to_hf(family_of(workload.config), workload.config, base_shapes, read):
            if name.rpartition(".")[0] in heads:
                tensors[f"{PREFIX}{name}"] = tensor
    return tensors


def _of_layer(layer: _Layer, workload: TransformerWorkload, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Return A of all parts stacked, B with a block for each, and for DoRA the row norms of all parts.

    A part without an adapter keeps its norms.
    """
    names = workload.shapes
    shapes = workload.shapes
    adapted = _adapted(layer, names)
    yield "lora_A.weight", torch.cat([read(f"{part}{A}") for part in adapted])
    rank = _adapter_of(workload).rank
    rows = []
    for part in layer.parts:
        block = torch.zeros(shapes[f"{part}.weight"][0], rank * len(adapted))
        if part in adapted:
            at = rank * adapted.index(part)
            block[:, at : at + rank] = read(f"{part}{B}")
        rows.append(block)
    order = None
    if layer.row.order:
        order = torch.tensor(layer.row.order(workload.config)).argsort()
    stacked = torch.cat(rows)
    yield "lora_B.weight", stacked if order is None else stacked[order]
    if _adapter_of(workload).kind == "dora":
        lengths = [
            read(f"{part}{LENGTH}") if part in adapted else read(f"{part}.weight").norm(dim=1)
            for part in layer.parts
        ]
        length = torch.cat(lengths)
        yield "lora_magnitude_vector", length if order is None else length[order]
