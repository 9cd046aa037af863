"""What may be divided of classes of transformers that are run as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from workloads.hf.as_they_are.hf_class import HuggingFaceModel, describe_hf_class
from workloads.hf.as_they_are.network import HuggingFaceNetwork

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
MORE: dict[str, dict[str, Any]] = {
    "GPTNeoX": {"intermediate_size": 64, "tie_word_embeddings": True},
    "Glm": {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "pad_token_id": 1},
    "Qwen3Moe": {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16},
    "Bloom": {},
    "Camembert": {"intermediate_size": 64},
}


def described(folder: Path, kind: str) -> HuggingFaceModel:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MORE[kind])
    config.architectures = [f"{kind}For{'MaskedLM' if kind == 'Camembert' else 'CausalLM'}"]
    config.save_pretrained(folder)
    return describe_hf_class(str(folder))


@pytest.mark.parametrize(
    ("kind", "tensors", "layers"),
    [
        ("GPTNeoX", "", ""),
        ("Glm", "", ""),
        ("Qwen3Moe", "", "the loss of its routers needs all layers at once"),
        ("Bloom", "ships no plan", "cannot be followed without data"),
        ("Camembert", "ships no plan", ""),
    ],
)
def test_what_cannot_be_divided_says_why(kind: str, tensors: str, layers: str, tmp_path: Path) -> None:
    model = described(tmp_path, kind)
    for (found, why), expected in ((model.styles, tensors), (model.layer_list, layers)):
        assert bool(found) == (not expected)
        if expected:
            with pytest.raises(AssertionError, match=expected):
                raise AssertionError(why)


@pytest.mark.parametrize("kind", ["GPTNeoX", "Camembert"])
def test_stages_have_all_tensors_once_and_tied_ones_at_both_ends(kind: str, tmp_path: Path) -> None:
    from workloads.hf.as_they_are.workload import HuggingFaceWorkload
    from workloads.objectives import build
    from workloads.workload import Vocabulary

    model = described(tmp_path, kind)
    vocabulary = Vocabulary(97, eos=4, pad=1, cls=3, sep=5, mask=6)
    name = "masked_lm" if kind == "Camembert" else "causal_lm"
    workload = HuggingFaceWorkload(
        "m", model, build(name, vocabulary=vocabulary, sequence_length=8, seed=0), vocabulary
    )
    places: dict[str, list[int]] = {}
    for number in range(3):
        with torch.device("meta"):
            stage = workload.build()
        assert isinstance(stage, HuggingFaceNetwork)
        stage.keep(number, number + 1)
        assert len(workload.blocks(stage)) == 1
        for tensor, _ in stage.named_parameters():
            places.setdefault(tensor, []).append(number)
    assert places.keys() == workload.shapes.keys()
    several = [tensor for tensor, numbers in places.items() if len(numbers) > 1]
    (tied,) = several
    assert places[tied] == [0, 2]
