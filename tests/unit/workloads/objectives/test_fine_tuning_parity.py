"""Fine-tuning here and in a plain loop of transformers: twenty steps on the same batches from the same weights, and the
losses of every step within 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.learning_rate import learning_rate
from workloads.load import load
from workloads.model.masks import attends
from workloads.objectives.samples import Samples
from workloads.record_format import CLOSE, MARK, pack, to_bits
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch, Vocabulary

SIZE, LENGTH, STEPS, ROWS = 97, 24, 20, 8
KNOWN = Vocabulary(SIZE, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5)
LABELS = ("bad", "fair", "good")
BERT = {"vocab_size": SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 1}  # fmt: skip
GPT2 = {"vocab_size": SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 1}  # fmt: skip
T5 = {"vocab_size": SIZE, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "dropout_rate": 0.0,
      "pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}  # fmt: skip
LLAMA = {"vocab_size": SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip


def words(number: int, least: int = 3, most: int = 9) -> np.ndarray:
    draw = np.random.default_rng(number)
    return draw.integers(6, SIZE, draw.integers(least, most))


def a_label(n: int) -> np.ndarray:
    return pack([words(n), words(n + 999) if n % 2 else [], [n % 3]])


def some_labels(n: int) -> np.ndarray:
    return pack([words(n), [], [label for label in range(3) if (n >> label) % 2]])


def a_number(n: int) -> np.ndarray:
    return pack([words(n), [], [to_bits(n % 7 / 3 - 1)]])


def word_labels(n: int) -> np.ndarray:
    return pack([words(n, 5, 30), np.arange(n, n + len(words(n, 5, 30))) % 4])


def a_span(n: int) -> np.ndarray:
    return pack([words(n, 2, 5), words(n + 999), [0, 0] if n % 5 == 0 else [n % 3 + 1, n % 3 + 2]])


def a_pair(n: int) -> np.ndarray:
    return pack([words(n, 3, 30), words(n + 999, 1, 30)])


def talks(n: int) -> np.ndarray:
    """Two conversations; in each an answer of several tokens, and a question."""
    found = []
    for number in (n, n + 999):
        talk = words(number, 6, 11)
        found += [np.where(np.arange(len(talk)) % 5 < 2, talk, talk | MARK), [CLOSE]]
    return np.concatenate(found)[:-1]


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    names = {"tokens": "input_ids", "token_types": "token_type_ids", "decoder_tokens": "decoder_input_ids",
             "positions": "position_ids"}  # fmt: skip
    found = {hf_name: batch[name] for name, hf_name in names.items() if name in batch}
    seen = attends(batch)
    mask = batch["padding"].long() if seen is None else seen.unsqueeze(1)
    return {**found, "attention_mask": mask}


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    given = inputs(batch)
    if "sequence_labels" in batch:
        return model(**given, labels=batch["sequence_labels"]).loss
    if batch["labels"].shape[1] == 2:
        # What is to be ignored lies beyond the end there.
        first, last = batch["labels"].where(batch["labels"] >= 0, LENGTH).unbind(1)
        return model(**given, start_positions=first, end_positions=last).loss
    if attends(batch) is not None:  # a decoder's own loss would shift the labels
        mask = torch.zeros(given["attention_mask"].shape).masked_fill(~given["attention_mask"], -torch.inf)
        logits = model(**given | {"attention_mask": mask}).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return model(**given, labels=batch["labels"]).loss


CASES: dict[str, tuple[str, dict[str, Any], str, Callable[[int], np.ndarray]]] = {
    "labels": ("BertForSequenceClassification", {**BERT, "num_labels": 3}, "sequence_classification", a_label),
    "labels of a decoder": (
        "GPT2ForSequenceClassification", {**GPT2, "num_labels": 3}, "sequence_classification", a_label,
    ),
    "several labels": (
        "BertForSequenceClassification",
        {**BERT, "num_labels": 3, "problem_type": "multi_label_classification"},
        "multi_label_classification", some_labels,
    ),
    "regression": ("BertForSequenceClassification", {**BERT, "num_labels": 1}, "regression", a_number),
    "words": ("BertForTokenClassification", {**BERT, "num_labels": 3}, "token_classification", word_labels),
    "span": ("BertForQuestionAnswering", BERT, "span_extraction", a_span),
    "seq2seq": ("T5ForConditionalGeneration", T5, "seq2seq", a_pair),
    "conversation": ("LlamaForCausalLM", LLAMA, "conversation", talks),
}  # fmt: skip


def begun(folder: Path, name: str) -> tuple[TransformerWorkload, Any]:
    """A workload and transformers' own model of the same weights."""
    kind, sizes, objective, _ = CASES[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**sizes)
    labels = LABELS if objective.endswith("_classification") else ()
    if labels:
        config.id2label = dict(enumerate(labels))
    theirs = model_class(config)
    # There the padding's row is never trained; only a span's loss, which is over padding too, has a gradient for it.
    theirs.get_input_embeddings().padding_idx = None
    theirs.save_pretrained(folder)
    workload = load(f"hf:{folder}", objective, KNOWN, sequence_length=LENGTH, labels=labels)
    assert workload.notes == ()
    return workload, theirs


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_have_the_losses_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    workload, theirs = begun(tmp_path, name)
    ours = workload.build()
    ours.load_state_dict({tensor: workload.initial(tensor, 0) for tensor in workload.shapes})
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4) for model in (ours, theirs)]
    read = Samples(CASES[name][3], 10_000)
    first = last = 0.0
    for step in range(STEPS):
        batch = workload.objective.collate(read, range(step % 5 * ROWS, (step % 5 + 1) * ROWS), 0)
        found = workload.loss(ours, batch)
        losses = [found.total / found.count, loss_of(theirs, batch)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        last = float(found.total.detach() / found.count)
        first = first or last
    assert last < first


@pytest.mark.parametrize("name", [name for name in CASES if name != "conversation"])
def test_an_export_has_the_class_and_the_names_of_the_labels(name: str, tmp_path: Path) -> None:
    workload, theirs = begun(tmp_path / "in", name)
    workload.check_hf()
    workload.to_hf(lambda tensor: workload.initial(tensor, 0), str(tmp_path / "out"))
    again, report = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    for tensor, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[tensor], value), tensor
    if workload.objective.labels:
        assert again.config.id2label == dict(enumerate(LABELS))


def test_packed_conversations_have_the_loss_of_separate_ones(tmp_path: Path) -> None:
    workload, theirs = begun(tmp_path, "conversation")
    batch = workload.objective.collate(Samples(talks, 100), [3], 0)
    total, count = 0.0, 0
    for talk in (talks(3)[: list(talks(3)).index(CLOSE)], talks(3)[list(talks(3)).index(CLOSE) + 1 :]):
        ids = torch.tensor((talk.astype(np.int64) & ~MARK)[None])
        labels = torch.tensor(
            np.where(talk.astype(np.int64) & MARK, talk.astype(np.int64) & ~MARK, -100)[None]
        )
        logits = theirs(ids).logits[:, :-1]
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        )
        count += int((labels[:, 1:] != -100).sum())
    ours = workload.build()
    ours.load_state_dict({tensor: workload.initial(tensor, 0) for tensor in workload.shapes})
    found = workload.loss(ours, batch)
    assert int(found.count) == count > 0
    torch.testing.assert_close(float(found.total.detach()), total, rtol=1e-5, atol=1e-5)


def test_what_is_cut_and_what_is_lost_of_conversations(tmp_path: Path) -> None:
    objective = begun(tmp_path, "conversation")[0].objective
    said = np.where(np.arange(LENGTH + 4) < LENGTH + 2, 7, 7 | MARK)
    full = np.concatenate([said[-LENGTH // 2 :], [CLOSE], said[-LENGTH // 2 :]])
    assert not objective.is_cut(full)  # they fit, though there is a word between them
    assert objective.is_cut(said)
    assert objective.is_lost(said)
    assert not objective.is_lost(said[4:])


RATE, CLIP, DECAY = 1e-3, 1.0, 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_have_the_losses_of_the_trainer(name: str, tmp_path: Path) -> None:
    """transformers' own Trainer, with its clipping, weight decay and schedule."""
    workload, theirs = begun(tmp_path / "model", name)
    read = Samples(CASES[name][3], 10_000)
    batches = [workload.objective.collate(read, range(n * ROWS, (n + 1) * ROWS), 0) for n in range(STEPS)]
    said: list[float] = []

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False)

        def compute_loss(self, model: Any, inputs: Batch, *_: Any, **__: Any) -> torch.Tensor:
            loss = loss_of(model, inputs)
            said.append(float(loss.detach()))
            return loss

    # It leaves norms and biases out of the decay, as ours does, and its AdamW has the same form.
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=STEPS, learning_rate=RATE, weight_decay=DECAY,
        adam_epsilon=1e-4, max_grad_norm=CLIP, lr_scheduler_type="linear", optim="adamw_torch", use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False, bf16=False,
    )  # fmt: skip
    Trainer(model=theirs.train(), args=args, train_dataset=batches).train()
    ours = workload.build()
    ours.load_state_dict({tensor: workload.initial(tensor, 0) for tensor in workload.shapes})
    matrices = [p for p in ours.parameters() if p.dim() > 1]
    vectors = [p for p in ours.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=1e-4)
    spec = OptimizerSpec(lr=RATE, warmup=0, schedule="linear", final_lr=0.0)
    assert len(said) == STEPS
    for step, batch in enumerate(batches):
        found = workload.loss(ours, batch)
        loss = found.total / found.count
        assert float(loss.detach()) == pytest.approx(said[step], rel=1e-5, abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step, STEPS)
        optimizer.step()
