"""Steps of a distilled student, equal to a plain loop of torch and transformers that is written here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rendezvous import recorded
from safetensors.torch import load_file
from torch import Tensor

from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.teacher import compared
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.load import load

sys.path.append(str(Path(__file__).parents[4] / "dist" / "train"))

VOCABULARY, LENGTH, ROWS, STEPS, LR = 160, 16, 8, 4, 2e-3
GROUP = 16
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OF_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
Plain = Callable[[Any, Any, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


def gpt(folder: Path, seed: int, width: int, layers: int) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 64, "initializer_range": 0.1}
    GPT2LMHeadModel(GPT2Config(**SIZES, **sizes, **NO_DROPOUT)).save_pretrained(folder)
    return folder


def bert(folder: Path, seed: int, width: int, layers: int, labels: tuple[str, ...] = ()) -> Path:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        **{**SIZES, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4},
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.1,
        **OF_BERT,
    )
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
    kind = BertForSequenceClassification if labels else BertForMaskedLM
    kind(config).save_pretrained(folder)
    return folder


def batch_of(step: int, objective: str, classes: int = 0) -> dict[str, Tensor]:
    """A global batch. Rows of an encoder have padding at their end, and 3 of 16 tokens are predicted."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(6, 150, (ROWS, LENGTH), generator=draw)
    if objective == "causal_lm":
        return {"tokens": tokens[:, :], "labels": tokens.roll(-1, 1)}
    padding = torch.arange(LENGTH) < LENGTH - torch.arange(ROWS).unsqueeze(1) % 5
    found = {"tokens": tokens.where(padding, 1), "padding": padding}
    if classes:
        return found | {"sequence_labels": torch.randint(0, classes, (ROWS,), generator=draw)}
    is_label = (torch.rand(ROWS, LENGTH, generator=draw) < 0.2) & padding
    return found | {"labels": tokens.where(is_label, -100)}


def hinton(teacher: Tensor, student: Tensor, kind: str, temperature: float) -> Tensor:
    """Divergences of rows by their definitions."""
    p, q = (F.softmax(each / temperature, -1) for each in (teacher, student))
    m = (p + q) / 2
    found = {
        "forward": lambda: F.kl_div(q.log(), p, reduction="none"),
        "reverse": lambda: F.kl_div(p.log(), q, reduction="none"),
        "jensen_shannon": lambda: (
            (F.kl_div(m.log(), p, reduction="none") + F.kl_div(m.log(), q, reduction="none")) / 2
        ),
    }[kind]()
    return found.sum(-1) * temperature**2


def of_tokens(kind: str, temperature: float, weights: tuple[float, float]) -> Plain:
    def loss(student: Any, teacher: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"input_ids": batch["tokens"]}
        given |= {"attention_mask": batch["padding"].long()} if "padding" in batch else {}
        with torch.no_grad():
            theirs = teacher(**given).logits
        ours, labels = student(**given).logits, batch["labels"]
        is_label = labels != -100
        own = F.cross_entropy(ours[is_label], labels[is_label])
        apart = hinton(theirs[is_label], ours[is_label], kind, temperature).mean()
        return weights[0] * own + weights[1] * apart, {"label_loss": own, "logit_loss": apart}

    return loss


def of_classes(order: list[int]) -> Plain:
    """Hinton's loss of classes; `order` gives the teacher's row of each of the student's labels."""

    def loss(student: Any, teacher: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"input_ids": batch["tokens"], "attention_mask": batch["padding"].long()}
        with torch.no_grad():
            theirs = teacher(**given).logits[:, order]
        ours = student(**given).logits
        own = F.cross_entropy(ours, batch["sequence_labels"])
        apart = hinton(theirs, ours, "forward", 3.0).mean()
        return 0.5 * own + 0.5 * apart, {"label_loss": own, "logit_loss": apart}

    return loss


class Inside:
    """Hidden states, queries, keys and values of a BERT, by hooks."""

    def __init__(self, model: Any) -> None:
        self.found: dict[str, list[Tensor]] = {"query": [], "key": [], "value": []}
        self.model = model
        for layer in model.bert.encoder.layer:
            for name in self.found:
                module = getattr(layer.attention.self, name)
                module.register_forward_hook(lambda _, __, out, name=name: self.found[name].append(out))

    def __call__(self, **given: Any) -> tuple[Tensor, Any, dict[str, list[Tensor]]]:
        for each in self.found.values():
            each.clear()
        output = self.model(**given, output_hidden_states=True)
        return output.logits, output.hidden_states, {name: list(each) for name, each in self.found.items()}


class Rounded:
    """A BERT whose layers compute with weights rounded to int4, in groups of GROUP; gradients pass straight through."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **given: Any) -> Any:
        weights = {
            name: straight_through(weight)
            for name, weight in self.model.named_parameters()
            if ".layer." in name and weight.dim() == 2
        }
        return torch.func.functional_call(self.model, weights, kwargs=given)


def straight_through(weight: Tensor) -> Tensor:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    groups = weight.detach().unflatten(-1, (-1, GROUP))
    scale = torch.maximum(groups.amax(-1) / 7, groups.amin(-1) / -8)
    args = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=GROUP)
    return weight + (fake_quantize(weight.detach(), scale, None, args) - weight).detach()


def relation(one: Tensor, other: Tensor, heads: int) -> Tensor:
    """Products [B, heads, L, L] over the root of a head's width."""
    a, b = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (one, other))
    return a @ b.transpose(-1, -2) / a.shape[-1] ** 0.5


def tiny_bert(maps: dict[int, Tensor]) -> Plain:
    """TinyBERT's hidden states and scores, and MiniLM's relations of attention and values, sample by sample."""

    def loss(student: Any, teacher: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"input_ids": batch["tokens"], "attention_mask": batch["padding"].long()}
        with torch.no_grad():
            theirs, their_hidden, there = teacher(**given)
        ours, hidden, here = student(**given)
        is_label = batch["labels"] != -100
        own = F.cross_entropy(ours[is_label], batch["labels"][is_label])
        apart = hinton(theirs[is_label], ours[is_label], "forward", 1.0).mean()
        squares, related = [], []
        for row, real in enumerate(batch["padding"]):
            size = int(real.sum())
            squares += [
                F.mse_loss(hidden[one][row, :size] @ maps[one].T, their_hidden[other][row, :size])
                for one, other in ((0, 0), (1, 2), (2, 4))
            ]

            def pairs(of: str, with_: str, at: tuple[int, int], row: int = row, size: int = size) -> Any:
                mine = relation(
                    here[of][at[0]][row : row + 1, :size], here[with_][at[0]][row : row + 1, :size], 4
                )
                other = relation(
                    there[of][at[1]][row : row + 1, :size], there[with_][at[1]][row : row + 1, :size], 4
                )
                return mine[0], other[0]

            mine, other = pairs("query", "key", (1, 3))
            related.append(F.mse_loss(mine, other))
            for of, with_ in (("query", "key"), ("value", "value")):
                mine, other = pairs(of, with_, (1, 3))
                each = F.kl_div(mine.log_softmax(-1), other.softmax(-1), reduction="none")
                related.append(each.sum() / (4 * size))
        inner, relations = torch.stack(squares).sum() / ROWS, torch.stack(related).sum() / ROWS
        total = 0.5 * own + 0.5 * apart + 0.7 * inner + 1.5 * relations
        return total, {
            "label_loss": own,
            "logit_loss": apart,
            "hidden_loss": inner,
            "relation_loss": relations,
        }

    return loss


def of_angles(first: bool) -> Plain:
    """DistilBERT's cosine loss between hidden states, or half of BERT-PKD's squared difference of the normalised states
    of the first token, sample by sample."""

    def loss(student: Any, teacher: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"input_ids": batch["tokens"], "attention_mask": batch["padding"].long()}
        with torch.no_grad():
            there = teacher(**given, output_hidden_states=True).hidden_states
        output = student(**given, output_hidden_states=True)
        own = F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        apart = []
        for row, real in enumerate(batch["padding"]):
            size = int(real.sum())
            for one, other in ((1, 2), (2, 4)):
                if first:
                    mine, theirs = (
                        F.normalize(each[row, 0], dim=0) for each in (output.hidden_states[one], there[other])
                    )
                    apart.append((mine - theirs).square().sum() / 2)
                else:
                    mine, theirs = output.hidden_states[one][row, :size], there[other][row, :size]
                    apart.append(F.cosine_embedding_loss(mine, theirs, torch.ones(size)))
        inner = torch.stack(apart).sum() / ROWS
        return 0.5 * own + 2.0 * inner, {"label_loss": own, "hidden_loss": inner}

    return loss


def steps_here(
    places: tuple[Path, Path],
    objective: str,
    distill: dict[str, Any],
    labels: list[str],
    out: Path,
    **more: Any,
) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Train by the engine, in two micro-batches a step: its metrics, the student's first maps, the last ones, and the
    weights as transformers reads them."""
    from rank_cases import VOCABULARY as KNOWN
    from rank_cases import job

    optimizer = {"clip": 1e9, "weight_decay": 0.0}
    case = {"model": f"hf:{places[0]}", "changes": {}, "objective": objective, "optimizer": optimizer}
    spec = job({**case, "labels": labels, "distill": {"teacher": f"hf:{places[1]}", **distill}, **more})
    student, teacher = (
        load(f"hf:{place}", objective, KNOWN, sequence_length=LENGTH, labels=labels) for place in places
    )
    assert spec.distill is not None
    student, teacher = compared(spec.distill, student, teacher)
    layout = Layout(micro_batch=ROWS // 2)
    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        engine = TorchEngine(spec.engine, student, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.hold_teacher(teacher, "")
        engine.initialise(3)

        def state() -> dict[str, Tensor]:
            return {piece.name: piece.data.detach().clone() for piece in engine.state()}

        first = {name: value for name, value in state().items() if name.startswith("distill.")}
        found = []
        for step in range(STEPS):
            batch = batch_of(step, objective, len(labels))
            halves = [{name: each.chunk(2)[n] for name, each in batch.items()} for n in range(2)]
            found.append(engine.train_step(halves, LR))
        last = state()
        student.to_hf(lambda name: last[f"model.{name}"], str(out))
        engine.close()
    return (
        found,
        first,
        {name: v for name, v in last.items() if name.startswith("distill.")},
        load_file(out / "model.safetensors"),
    )


def compare(
    here: tuple[list[Any], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]],
    student: Any,
    teacher: Any,
    loss: Plain,
    batches: list[dict[str, Tensor]],
    maps: dict[int, Tensor],
    model: Any = None,
) -> None:
    """Train by the plain loop, and compare losses, their parts, gradient norms and weights."""
    found, _, last_maps, weights = here
    model = model or student
    trained = [*model.parameters(), *maps.values()]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    for metrics, batch in zip(found, batches, strict=True):
        optimizer.zero_grad()
        total, parts = loss(student, teacher, batch)
        total.backward()
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        optimizer.step()
        assert metrics.loss == pytest.approx(float(total.detach()), rel=1e-5)
        assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-4)
        for name, value in parts.items():
            assert metrics.extra[name] == pytest.approx(float(value.detach()), rel=1e-5, abs=1e-6), name
    plain = model.state_dict()
    compared_names = [name for name in weights if name in plain]
    assert len(compared_names) >= len(list(model.parameters())) - 1  # the tied head is stored once
    for name in compared_names:
        torch.testing.assert_close(
            weights[name], plain[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert len(last_maps) == len(maps)
    for layer, value in maps.items():
        torch.testing.assert_close(
            last_maps[f"distill.hidden.{layer}.weight"], value.detach(), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen_shannon"])
def test_a_decoder_learns_as_in_a_plain_loop(kind: str, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    places = gpt(tmp_path / "student", 1, 32, 2), gpt(tmp_path / "teacher", 2, 48, 3)
    distill = {"labels": 0.4, "logits": {"weight": 0.6, "temperature": 2.0, "divergence": kind}}
    here = steps_here(places, "causal_lm", distill, [], tmp_path / "out")
    student, teacher = (GPT2LMHeadModel.from_pretrained(place) for place in places)
    batches = [batch_of(step, "causal_lm") for step in range(STEPS)]
    compare(here, student.train(), teacher.eval(), of_tokens(kind, 2.0, (0.4, 0.6)), batches, {})


def test_a_classifier_learns_as_in_a_plain_loop_whatever_the_order_of_labels(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    labels = ["good", "bad", "odd"]
    places = (
        bert(tmp_path / "student", 1, 32, 2, ("good", "bad", "odd")),
        bert(tmp_path / "teacher", 2, 48, 3, ("odd", "good", "bad")),
    )
    distill = {"labels": 0.5, "logits": {"weight": 0.5, "temperature": 3.0}}
    here = steps_here(places, "sequence_classification", distill, labels, tmp_path / "out")
    student, teacher = (BertForSequenceClassification.from_pretrained(place) for place in places)
    batches = [batch_of(step, "sequence_classification", 3) for step in range(STEPS)]
    compare(here, student.train(), teacher.eval(), of_classes([1, 2, 0]), batches, {})


def test_an_encoder_learns_layers_and_relations_as_in_a_plain_loop(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    places = bert(tmp_path / "student", 1, 32, 2), bert(tmp_path / "teacher", 2, 48, 4)
    distill = {
        "labels": 0.5,
        "logits": {"weight": 0.5, "temperature": 1.0},
        "hidden": {"weight": 0.7, "layers": [[0, 0], [1, 2], [2, 4]]},
        "relations": {"weight": 1.5, "of": ["scores", "attention", "values"]},
    }
    here = steps_here(places, "masked_lm", distill, [], tmp_path / "out")
    student, teacher = (BertForMaskedLM.from_pretrained(place) for place in places)
    maps = {layer: here[1][f"distill.hidden.{layer}.weight"].clone().requires_grad_() for layer in (0, 1, 2)}
    batches = [batch_of(step, "masked_lm") for step in range(STEPS)]
    compare(here, Inside(student.train()), Inside(teacher.eval()), tiny_bert(maps), batches, maps, student)


def test_a_student_with_rounded_weights_learns_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Quantisation-aware distillation: the student computes in int4, and the teacher in full precision."""
    from transformers import BertForMaskedLM

    places = bert(tmp_path / "student", 1, 32, 2), bert(tmp_path / "teacher", 2, 48, 3)
    distill = {"labels": 0.4, "logits": {"weight": 0.6, "temperature": 2.0}}
    rounds = {"quantize": {"weights": "int4", "group": GROUP}}
    here = steps_here(places, "masked_lm", distill, [], tmp_path / "out", **rounds)
    student, teacher = (BertForMaskedLM.from_pretrained(place) for place in places)
    batches = [batch_of(step, "masked_lm") for step in range(STEPS)]
    loss = of_tokens("forward", 2.0, (0.4, 0.6))
    compare(here, Rounded(student.train()), teacher.eval(), loss, batches, {}, student)


@pytest.mark.parametrize("tokens", ["all", "first"])
def test_an_encoder_learns_angles_of_states_as_in_a_plain_loop(tokens: str, tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    places = bert(tmp_path / "student", 1, 32, 2), bert(tmp_path / "teacher", 2, 32, 4)
    hidden = {"weight": 2.0, "loss": "cosine", "tokens": tokens}
    here = steps_here(
        places, "masked_lm", {"labels": 0.5, "logits": None, "hidden": hidden}, [], tmp_path / "out"
    )
    student, teacher = (BertForMaskedLM.from_pretrained(place) for place in places)
    batches = [batch_of(step, "masked_lm") for step in range(STEPS)]
    compare(here, student.train(), teacher.eval(), of_angles(tokens == "first"), batches, {})
