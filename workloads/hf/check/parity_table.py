"""Compare every model that has a conversion table with transformers: same weights, same logits and loss.

The page in the docs also has the models of extensions. The module that writes it passes its own command to `table`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.hf.check.compare import TOLERANCE, arguments, difference, load, probes
from workloads.hf.files.hf_config import GENERATOR
from workloads.model.config import TransformerConfig
from workloads.model.initialise import is_norm, normal
from workloads.model.losses import loss
from workloads.model.presets import preset
from workloads.model.transformer import Output
from workloads.objectives.causal_lm import CausalLM
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch, Vocabulary

SIZE = 97
LENGTH = 24
VOCABULARY = Vocabulary(SIZE, eos=2, pad=1, bos=0)


@dataclass(frozen=True)
class Case:
    """A model to compare: a tiny preset with changes. `inputs` are the batch entries besides tokens."""

    title: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()

    @property
    def config(self) -> TransformerConfig:
        """Return the model's configuration with the small vocabulary."""
        sizes = {"vocab_size": SIZE, "max_positions": LENGTH, "hidden": 32, "heads": 4, "intermediate": 64}
        return preset(self.model).changed({**sizes, **self.changes})


@dataclass(frozen=True)
class Difference:
    """The largest difference of logits, and the difference of the loss, in fp32."""

    case: Case
    kind: str
    logits: float
    loss: float


def _heads(models: str, head: str) -> tuple[Case, ...]:
    changes = {"head": head, "sentence_head": False, "generator": 0, "classes": 3}
    cases = []
    for model in models.split():
        narrow = {"embedding_size": 16} if model == "albert" else {}
        title = f"{preset(f'{model}-tiny').family}, {head} classes"
        cases.append(Case(title, f"{model}-tiny", changes | narrow, ("padding",)))
    return tuple(cases)


def _untied(models: str) -> tuple[Case, ...]:
    more: dict[str, dict[str, Any]] = {
        "bert": {"sentence_head": False}, "albert": {"embedding_size": 16, "sentence_head": False},
        "electra": {"generator": 0, "head": "masked"}, "switch": SWITCH | {"scaled_head": False},
    }  # fmt: skip
    return tuple(
        Case(f"{model}, untied", f"{model}-tiny", {"tied": False, **more.get(model, {})}, ("padding",))
        for model in models.split()
    )


_DEBERTA = {"layers": 2, "disentangled": 6, "relative_distance": 16}
_PAIR = {"layers": 2, "kv_heads": 0, "head_dim": 0}
SWITCH = {"intermediate": 64, "moe": {"intermediate": 64, "capacity_factor": None, "capacity": 7}}
_SMALL = {"layers": 2, "kv_heads": 2, "head_dim": 8}
_FEW = {"experts": 4, "top_k": 2, "intermediate": 32}
_LONG = {"kind": "llama3", "factor": 8.0, "original_positions": 8}
_YARN = {"kind": "yarn", "factor": 4.0, "original_positions": 8, "mscale": 1.0, "mscale_all": 0.8}
_GEMMA3 = _SMALL | {"window": 6, "full_every": 2}
_OSS = _SMALL | {
    "window": 6,
    "intermediate": 32,
    "moe": _FEW,
    "swiglu_limit": 0.25,
    "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 8, "truncate": False},
}
_FAR = {"kind": "linear", "factor": 8.0}
_YARN_AS_TOLD = {
    "kind": "yarn",
    "factor": 4.0,
    "original_positions": 8,
    "attention_factor": 1.2,
    "truncate": False,
}
CASES = (
    Case("GPT-2", "gpt-tiny", {"layers": 2}),
    Case("Llama 3", "llama-tiny"),
    Case("Llama 3.1, stretched rotary", "llama-tiny", {"rope_scaling": _LONG}),
    Case("Llama, linear rotary", "llama-tiny", {"rope_scaling": {"kind": "linear", "factor": 4.0}}),
    Case("Llama, YaRN", "llama-tiny", {"rope_scaling": {**_YARN, "mscale": 0.0, "mscale_all": 0.0}}),
    Case("Llama, YaRN with an explicit attention factor", "llama-tiny", {"rope_scaling": _YARN_AS_TOLD}),
    Case("Qwen 3", "qwen3-tiny", {"head_dim": 16}),
    Case("Mixtral", "mixtral-tiny", {"intermediate": 64}),
    Case("Mixtral, window", "mixtral-tiny", {"intermediate": 64, "window": 6}),
    Case("Qwen 2", "qwen2-7b", _SMALL),
    Case("Qwen 2, window", "qwen2-7b", _SMALL | {"window": 6}),
    Case("Mistral", "mistral-7b", _SMALL | {"window": 0}),
    Case("Mistral, window", "mistral-7b", _SMALL | {"window": 6, "head_dim": 16}),
    Case("Phi-3", "phi-3-mini", _SMALL | {"window": 6}),
    Case("OLMo 2", "olmo-2-7b", _SMALL),
    Case("Gemma 2", "gemma-2-2b", _SMALL | {"layers": 3, "window": 6, "score_cap": 1.5, "logit_cap": 2.0}),
    Case(
        "Gemma 2, no caps",
        "gemma-2-2b",
        _SMALL | {"score_cap": 0.0, "logit_cap": 0.0, "attention_scale": 0.5},
    ),
    Case("Gemma 3", "gemma-3-1b", _GEMMA3 | {"layers": 3, "logit_cap": 2.0}),
    Case("Gemma 3, stretched rotary", "gemma-3-1b", _GEMMA3 | {"window": 5, "rope_scaling": _FAR}),
    Case(
        "Gemma 3, sequence classes", "gemma-3-1b", _GEMMA3 | {"head": "sequence", "classes": 3}, ("padding",)
    ),
    Case("Qwen2-MoE", "qwen1.5-moe-a2.7b", _SMALL | {"moe": _FEW}),
    Case(
        "Qwen2-MoE, every second layer",
        "qwen1.5-moe-a2.7b",
        _SMALL | {"moe": _FEW | {"every": 2, "first": 1}},
    ),
    Case("Qwen3-MoE", "qwen3-30b-a3b", _SMALL | {"moe": _FEW, "head_dim": 16}),
    Case("gpt-oss", "gpt-oss-20b", _OSS | {"layers": 3}),
    Case(
        "gpt-oss, no windows, no clamp that acts",
        "gpt-oss-20b",
        _OSS | {"window": 0, "full_every": 0, "swiglu_limit": 50.0},
    ),
    Case("gpt-oss, sequence classes", "gpt-oss-20b", _OSS | {"head": "sequence", "classes": 3}, ("padding",)),
    Case("DeepSeek-V3", "deepseek-v3-tiny"),
    Case("DeepSeek-V3, YaRN", "deepseek-v3-tiny", {"rope_scaling": _YARN}),
    Case("DeepSeek-V3, full-rank queries", "deepseek-v3-tiny", {"latent": {"query_rank": 0}}),
    Case("BERT", "bert-tiny", {}, ("padding", "token_types", "sentence")),
    Case("RoBERTa", "roberta-tiny", {}, ("padding",)),
    Case("RoBERTa, relu", "roberta-tiny", {"activation": "relu"}, ("padding",)),
    Case("XLM-R", "xlm-roberta-base", {"layers": 2}, ("padding",)),
    Case("DistilBERT", "distilbert-base", {"layers": 2}, ("padding",)),
    Case("ERNIE", "ernie-1.0-base", {"layers": 2}, ("padding", "token_types", "sentence")),
    Case(
        "ERNIE, types of tasks",
        "ernie-1.0-base",
        {"layers": 2, "task_types": 3, "sentence_head": False},
        ("padding", "token_types", "task_types"),
    ),
    Case("MPNet", "mpnet-base", {"layers": 2}, ("padding",)),
    *(
        Case(f"MPNet, {head} classes", "mpnet-base", {"layers": 2, "head": head, "classes": 3}, ("padding",))
        for head in ("sequence", "token")
    ),
    Case("DeBERTa V3", "deberta-v3-base", _DEBERTA, ("padding",)),
    Case(
        "DeBERTa V2, positions and token types",
        "deberta-v3-base",
        _DEBERTA | {"positions": "learned", "token_types": 2, "disentangled": 8, "relative_distance": 20},
        ("padding", "token_types"),
    ),
    Case(
        "DeBERTa V3, sequence classes",
        "deberta-v3-base",
        _DEBERTA | {"head": "sequence", "classes": 3},
        ("padding",),
    ),
    Case(
        "DeBERTa V3, token classes",
        "deberta-v3-base",
        _DEBERTA | {"head": "token", "classes": 3},
        ("padding",),
    ),
    Case("XLNet", "xlnet-base", {"layers": 2, "kv_heads": 0, "head_dim": 0}, ("padding",)),
    Case(
        "XLNet, segments",
        "xlnet-base",
        {"layers": 2, "kv_heads": 0, "head_dim": 0, "tied": False},
        ("padding", "token_types"),
    ),
    Case("ALBERT", "albert-tiny", {"embedding_size": 16}, ("padding", "token_types", "sentence")),
    Case("ELECTRA, discriminator", "electra-tiny", {"generator": 0, "embedding_size": 16}, ("padding",)),
    Case("ELECTRA, generator", "electra-tiny", {"generator": 0, "head": "masked"}, ("padding",)),
    Case("ELECTRA, pair", "electra-tiny", {"generator": 16, "heads": 2, "activation": "relu"}, ("padding",)),
    Case("UniLM", "unilm-tiny", {}, ("attention", "token_types")),
    Case("T5", "t5-tiny", {}, ("padding",)),
    Case("T5 1.1", "t5-v1.1-tiny", {}, ("padding",)),
    Case("mT5", "mt5-small", {"layers": 2, "kv_heads": 0}, ("padding",)),
    Case("mT5, tied", "mt5-small", {"layers": 2, "kv_heads": 0, "tied": True}, ("padding",)),
    Case("BART", "bart-tiny", {}, ("padding",)),
    Case("BART, scaled embeddings", "bart-tiny", {"scaled_embedding": True}, ("padding",)),
    Case("mBART", "mbart-large", _PAIR, ("padding",)),
    Case("PEGASUS", "pegasus-large", _PAIR, ("padding",)),
    Case(
        "PEGASUS, plain embeddings",
        "pegasus-large",
        _PAIR | {"scaled_embedding": False, "activation": "gelu"},
        ("padding",),
    ),
    Case("Switch", "switch-tiny", SWITCH, ("padding",)),
    *_untied("gpt bert roberta albert electra t5 bart switch"),
    *_heads("bert roberta albert electra gpt llama qwen3", "sequence"),
    *_heads("bert roberta albert electra gpt llama qwen3", "token"),
)


def compare(case: Case) -> Difference:
    """Export random weights of the case, load them in transformers, and compare in fp32."""
    config = case.config
    objective = CausalLM(vocabulary=VOCABULARY, sequence_length=LENGTH, seed=0)
    workload = TransformerWorkload(case.model, config, objective, VOCABULARY)
    state = random_state(workload)
    model = workload.build().eval()
    model.load_state_dict(state)
    batch = batch_for(case)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        workload.to_hf(state.__getitem__, folder)
        text = torch.randint(3, SIZE, (4 * LENGTH,), generator=torch.Generator().manual_seed(1))
        plain = probes(config, VOCABULARY, text, (LENGTH, LENGTH // 2 + 1, 5))
        logits = difference(config, model, folder, [batch, *plain])
        hf_model = load(folder)
        kind = type(hf_model).__name__
        if config.generator:
            return Difference(
                case, f"{kind}, {type(load(str(Path(folder) / GENERATOR))).__name__}", logits, 0.0
            )
        hf_loss = hf_model(**arguments(config, batch), **_labels(config, batch)).loss
        value = _mean_loss(config, model(batch), batch)
    return Difference(case, kind, logits, float((value - hf_loss).abs()))


def _mean_loss(config: TransformerConfig, output: Output, batch: Batch) -> Tensor:
    """Return the loss as transformers defines it: a mean over tokens, without the routers' loss."""
    if config.head == "discriminator":
        assert output.logits is not None
        real = batch["padding"]
        return F.binary_cross_entropy_with_logits(output.logits[real], batch["labels"][real].float())
    summed = loss(config, output, batch)
    mean = summed.total / summed.count
    return mean + summed.extra if config.sentence_head and summed.extra is not None else mean


def random_state(workload: TransformerWorkload) -> dict[str, Tensor]:
    """Return weights without zeros and ones, so that a missing part changes the result."""
    state = {}
    for name, shape in workload.shapes.items():
        random = normal(1, name, shape)
        if is_norm(name):
            state[name] = 1 + 0.1 * random
        elif name.endswith("bias"):
            state[name] = 0.05 * random
        else:
            state[name] = 0.1 * random
    return state


def batch_for(case: Case) -> Batch:
    """Return two rows, the second one padded if the case has padding."""
    config = case.config
    random = torch.Generator().manual_seed(0)

    def ids(*shape: int, high: int = SIZE) -> Tensor:
        return torch.randint(3 if high == SIZE else 0, high, shape, generator=random)

    real = torch.ones(2, LENGTH, dtype=torch.bool)
    batch = {"tokens": ids(2, LENGTH)}
    if "padding" in case.inputs:
        real[1, LENGTH - 5 :] = False
        batch = {"tokens": batch["tokens"].masked_fill(~real, 1), "padding": real}
    for kinds in ("token_types", "task_types"):
        if kinds in case.inputs:
            batch[kinds] = ids(2, LENGTH, high=getattr(config, kinds) or 2)
    if "attention" in case.inputs:
        order = torch.arange(LENGTH)
        batch["attention"] = ((order < 8)[None] | (order[None] <= order[:, None])).expand(2, -1, -1)
    if "sentence" in case.inputs or config.head == "sequence":
        batch["sequence_labels"] = ids(2, high=2)
    if config.architecture == "encoder-decoder":
        batch["decoder_tokens"] = ids(2, LENGTH)
    classes = {"discriminator": 2, "token": config.classes}.get(config.head, SIZE)
    batch["labels"] = ids(2, LENGTH, high=classes).masked_fill(~real, -100)
    if config.architecture == "decoder" and config.head == "language":
        batch["labels"][:, -1] = -100
    return batch


def _labels(config: TransformerConfig, batch: Batch) -> dict[str, Tensor]:
    """Return transformers' label arguments for our batch. Its decoders shift labels themselves; ours are already
    shifted.
    """
    labels = batch["labels"]
    if config.head == "sequence":
        labels = batch["sequence_labels"]
    elif config.architecture == "decoder" and config.head == "language":
        labels = torch.cat((labels[:, :1], labels[:, :-1]), dim=1)
    label_arguments = {"labels": labels}
    if config.sentence_head:
        name = "sentence_order_label" if config.family == "albert" else "next_sentence_label"
        label_arguments[name] = batch["sequence_labels"]
    return label_arguments


def table(command: str) -> Iterator[str]:
    """Yield the table in Markdown, one row for each case. `command` is what generates the page."""
    yield "# Parity with transformers\n"
    yield f"Generated by `{command}`: random weights, exported, loaded by transformers,"
    yield "compared in fp32 on CPU, on batches whole and padded at either end and at several lengths (a router with a"
    yield f"capacity: at the end only); the tests hold every row below {TOLERANCE:.0e}.\n"
    yield "| class | checked against | largest difference of logits | difference of loss |"
    yield "|---|---|---|---|"
    for case in CASES:
        result = compare(case)
        yield f"| {case.title} | `{result.kind}` | {result.logits:.1e} | {result.loss:.1e} |"
