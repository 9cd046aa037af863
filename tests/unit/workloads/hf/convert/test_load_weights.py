"""Weights that a model begins with: what is new is named, what has no place is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from workloads.errors import WorkloadError
from workloads.load import load
from workloads.workload import Vocabulary, Workload

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KNOWN = Vocabulary(97, eos=2, pad=1, cls=3, sep=4, mask=5)
GROWN = Vocabulary(100, eos=2, pad=1, cls=3, sep=4, mask=5, added=96)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(intermediate_size=64, **SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def begun(folder: Path, vocabulary: Vocabulary = KNOWN, objective: str = "masked_lm") -> Workload:
    return load(f"hf:{folder}", objective, vocabulary, sequence_length=24)


def test_a_checkpoint_of_the_same_model_has_nothing_to_tell(bert: Path) -> None:
    assert begun(bert).notes == ()


def test_a_new_head_and_what_is_left_out_are_named(bert: Path, tmp_path: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    tensors |= {f"classifier.{leaf}": torch.zeros(2) for leaf in ("weight", "bias")}
    tensors = {k: v for k, v in tensors.items() if not k.startswith("cls.predictions.transform")}
    tensors["bert.embeddings.position_ids"] = torch.arange(9)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    new, left = begun(tmp_path).notes
    assert new.startswith(
        "head.dense.weight, head.dense.bias, head.norm.weight, head.norm.bias start from random values"
    )
    assert left.startswith("classifier.bias, classifier.weight of ")


def test_a_tensor_without_a_place_is_refused_by_name(bert: Path, tmp_path: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    tensors["bert.encoder.layer.2.output.dense.bias"] = torch.zeros(32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    with pytest.raises(
        WorkloadError, match=r"has bert\.encoder\.layer\.2\.output\.dense\.bias, which this model"
    ):
        begun(tmp_path)


def test_rows_of_added_tokens_depend_on_seed_and_row_alone(bert: Path) -> None:
    workload = begun(bert, GROWN)
    assert any(line.startswith("tokens 97 to 99 start from random values") for line in workload.notes)
    name = "tokens.weight"
    whole, stored = workload.initial(name, 5), workload.stored(name, 5)
    assert stored is not None
    assert torch.equal(
        whole[:97], load_file(bert / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    )
    for part in ((slice(0, 50), slice(3, 9)), (slice(90, 99), slice(0, 32)), (slice(98, 100), slice(31, 32))):
        assert torch.equal(stored[part], whole[part])
    longer = begun(bert, Vocabulary(120, eos=2, pad=1, cls=3, sep=4, mask=5, added=97))
    assert torch.equal(longer.initial(name, 5)[:100], whole)
    assert not torch.equal(workload.initial(name, 6)[97:], whole[97:])
    assert torch.equal(workload.initial("head.output.bias", 5)[97:], torch.zeros(3))


def test_a_larger_tokenizer_of_another_kind_is_refused(bert: Path) -> None:
    with pytest.raises(WorkloadError, match="has 97 tokens but the tokenizer 100"):
        begun(bert, Vocabulary(100, eos=2, pad=1, cls=3, sep=4, mask=5, added=99))
