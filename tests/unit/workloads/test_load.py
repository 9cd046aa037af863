"""From a job file's words to a workload: every objective with the models it trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from texts import Corpus

from workloads import objectives
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check.parity_table import VOCABULARY, Case, random_state
from workloads.load import load
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

SIZE, LENGTH = 300, 48
FULL = Vocabulary(
    SIZE,
    eos=0,
    pad=1,
    bos=2,
    cls=3,
    sep=4,
    mask=5,
    sentinels=tuple(range(200, SIZE)),
    word_start=np.arange(SIZE) % 3 != 1,
    sentence_end=np.arange(SIZE) % 11 == 7,
)
MODELS = {
    "decoder": ("gpt-tiny", "llama-tiny", "mixtral-tiny", "deepseek-v3-tiny"),
    "encoder": ("bert-tiny", "roberta-tiny", "albert-tiny", "electra-tiny"),
    "prefix": ("glm-tiny", "unilm-tiny"),
    "encoder-decoder": ("t5-tiny", "bart-tiny", "switch-tiny"),
}
NEEDS = {"replaced_token_detection": "electra-tiny", "blank_infilling": "glm-tiny"}
PAIRS = [
    (objective, model)
    for objective in objectives.OF_TEXT
    for architecture in sorted(objectives.architectures(objective))
    for model in MODELS[architecture]
    if NEEDS.get(objective, model) == model
]


OPTIONS = {"entity_masking": {"entities": [[10, 11], [30], [50, 51, 52]]}}


def corpus(window: int, pairs: bool = False) -> "objectives.sampled.Read":
    def read(sample: int) -> np.ndarray:
        tokens = np.random.default_rng(sample).integers(6, 200, window)
        tokens[window // 2 + sample % 5] = FULL.eos
        if pairs:
            tokens[[5, window - 5]] = FULL.sep
        return tokens

    return read


@pytest.mark.parametrize(("objective", "model"), PAIRS)
def test_every_objective_trains_its_models(objective: str, model: str) -> None:
    workload = load(model, objective, FULL, options=OPTIONS.get(objective), sequence_length=LENGTH, seed=3)
    net = workload.build()
    net.load_state_dict({n: workload.initial(n, 3) for n in workload.shapes})
    window = workload.objective.window(LENGTH)
    batch = workload.objective.collate(Corpus(corpus(window, objective == "translation_lm")), [4, 5], turn=0)
    result = workload.loss(net, batch)
    assert result.count > 0
    mean = result.total / result.count
    assert mean.item() == pytest.approx(np.log(SIZE), rel=0.1) or workload.config.initial == "fan_in"
    (mean if result.extra is None else mean + result.extra).backward()
    assert [n for n, p in net.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(("objective", "model"), PAIRS)
def test_a_batch_may_be_cut_anywhere(objective: str, model: str) -> None:
    """Sums over micro-batches are those of the batch, and so are means over equal micro-batches."""
    workload = load(model, objective, FULL, options=OPTIONS.get(objective), sequence_length=LENGTH, seed=3)
    net = workload.build()
    net.load_state_dict({n: workload.initial(n, 3) for n in workload.shapes})
    batch = workload.objective.collate(Corpus(corpus(workload.objective.window(LENGTH))), [1, 2], turn=0)
    with torch.no_grad():
        whole = workload.loss(net, batch)
        parts = [workload.loss(net, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(2)]
    assert torch.allclose(whole.total, sum(p.total for p in parts), rtol=1e-4)
    assert whole.count == sum(p.count for p in parts)
    if whole.extra is not None:
        assert torch.allclose(whole.extra, sum(p.extra for p in parts) / 2, rtol=1e-4)


def test_an_objective_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(WorkloadError, match=r"does not train gpt-tiny \(decoder\); use causal_lm"):
        load("gpt-tiny", "masked_lm", FULL, sequence_length=LENGTH)
    with pytest.raises(WorkloadError, match="use span_corruption, denoising"):
        load("t5-tiny", "causal_lm", FULL, sequence_length=LENGTH)


def test_what_is_unknown_or_too_small_is_refused() -> None:
    with pytest.raises(WorkloadError, match="nearest are"):
        load("gtp-tiny", "causal_lm", FULL, sequence_length=LENGTH)
    with pytest.raises(WorkloadError, match="no objective"):
        load("gpt-tiny", "causal", FULL, sequence_length=LENGTH)
    with pytest.raises(WorkloadError, match="exceeds the 512 positions of gpt-tiny"):
        load("gpt-tiny", "causal_lm", FULL, sequence_length=513)
    with pytest.raises(WorkloadError, match="has 100 tokens but the tokenizer 300"):
        load("gpt-tiny", "causal_lm", FULL, changes={"vocab_size": 100}, sequence_length=LENGTH)
    assert load("llama-tiny", "causal_lm", FULL, sequence_length=513).config.max_positions == 512


def test_a_window_does_not_hide_the_text_from_what_is_laid_behind_it() -> None:
    load("bert-tiny", "permuted_lm", FULL, sequence_length=LENGTH, changes={"window": LENGTH})
    with pytest.raises(WorkloadError, match="the attention window of 8 of bert-tiny hides the text"):
        load("bert-tiny", "permuted_lm", FULL, sequence_length=LENGTH, changes={"window": 8})


def test_a_model_without_what_the_objective_needs_is_refused() -> None:
    with pytest.raises(WorkloadError, match="use glm-base or set block_positions"):
        load("unilm-tiny", "blank_infilling", FULL, sequence_length=LENGTH)
    with pytest.raises(WorkloadError, match="use electra-base or set generator"):
        load("bert-tiny", "replaced_token_detection", FULL, sequence_length=LENGTH)


def test_the_vocabulary_and_changes_reach_the_model() -> None:
    workload = load("gpt-tiny", "causal_lm", FULL, changes={"layers": 3}, sequence_length=LENGTH)
    assert workload.config.vocab_size == SIZE
    assert workload.stages() == ("layers.1", "layers.2")
    assert workload.shapes["tokens.weight"] == (SIZE, 128)
    wide = load("gpt-tiny", "causal_lm", FULL, changes={"vocab_size": 320}, sequence_length=LENGTH)
    assert wide.shapes["tokens.weight"] == (320, 128)


def test_roberta_counts_positions_from_the_padding_id() -> None:
    other = Vocabulary(300, eos=0, pad=6, cls=3, sep=4, mask=5, word_start=FULL.word_start)
    assert load("roberta-tiny", "masked_lm", other, sequence_length=LENGTH).config.position_offset == 7


def test_an_export_says_how_its_decoder_begins(tmp_path: Path) -> None:
    for model, objective, start in (
        ("t5-tiny", "span_corruption", FULL.pad),
        ("bart-tiny", "denoising", FULL.eos),
    ):
        workload = load(model, objective, FULL, sequence_length=LENGTH)
        workload.to_hf(lambda name, w=workload: w.initial(name, 0), str(tmp_path / model))
        assert transformers.AutoConfig.from_pretrained(tmp_path / model).decoder_start_token_id == start


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = TransformerWorkload("gpt", Case("GPT-2", "gpt-tiny", {"layers": 2}).config, None, VOCABULARY)
    state = random_state(first)
    first.to_hf(state.__getitem__, str(tmp_path))
    again = load(f"hf:{tmp_path}", "causal_lm", Vocabulary(97, 2), sequence_length=24)
    assert isinstance(again, TransformerWorkload)
    assert all(torch.equal(again.initial(name, seed=5), value) for name, value in state.items())
    (tmp_path / "model.safetensors").unlink()
    fresh = load(f"hf:{tmp_path}/config.json", "causal_lm", Vocabulary(97, 2), sequence_length=24)
    assert not torch.equal(fresh.initial("tokens.weight", 0), state["tokens.weight"])
    assert fresh.shapes == again.shapes


HF_CLASSES = {
    "decoder": transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    ),
    "encoder": transformers.CamembertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "encoder-decoder": transformers.PegasusConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, activation_dropout=0.0,
    ),
}  # fmt: skip
TRAINED = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "denoising"}
AS_IT_IS: dict[str, Any] = {"sequence_length": LENGTH, "implementation": "transformers"}
SMALL = Vocabulary(97, eos=0, pad=1, bos=2, cls=3, sep=4, mask=5, sentence_end=np.arange(97) % 9 == 8)


def hf_class(tmp_path: Path, architecture: str) -> HuggingFaceWorkload:
    HF_CLASSES[architecture].save_pretrained(tmp_path)
    workload = load(f"hf:{tmp_path}", TRAINED[architecture], SMALL, **AS_IT_IS)
    assert isinstance(workload, HuggingFaceWorkload)
    return workload


def filled(workload: HuggingFaceWorkload, seed: int) -> torch.nn.Module:
    """The model as the trainer makes it: built without memory, moved, filled by name."""
    with torch.device("meta"):
        model = workload.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(workload.initial(name, seed))
        for name, buffer in model.named_buffers():
            if name in workload.shapes:
                buffer.copy_(workload.initial(name, seed))
    return model


@pytest.mark.parametrize("architecture", HF_CLASSES)
def test_another_class_of_transformers_runs_as_it_is(architecture: str, tmp_path: Path) -> None:
    workload = hf_class(tmp_path / "config", architecture)
    # The plan of transformers for tensors, where there is one, and one cut between two layers in one list.
    divided = {"decoder": (4, 1), "encoder": (0, 1)}
    assert (len(workload.sharding()), len(workload.stages())) == divided.get(architecture, (0, 0))
    model = filled(workload, seed=2)
    window = workload.objective.window(LENGTH)
    batch = workload.objective.collate(
        Corpus(lambda i: np.random.default_rng(i).integers(6, 97, window)), [0, 1], 0
    )
    result = workload.loss(model, batch)
    (result.total / result.count).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    # What was exported is what transformers computes, and training can go on from it.
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    workload.to_hf(state.__getitem__, str(tmp_path / "export"))
    again = load(f"hf:{tmp_path / 'export'}", TRAINED[architecture], SMALL, **AS_IT_IS)
    assert torch.equal(workload.loss(filled(again, seed=9), batch).total, result.total)
    assert again.config.parameters() == sum(p.numel() for p in model.parameters())


def test_another_class_begins_as_transformers_begins_it(tmp_path: Path) -> None:
    workload = hf_class(tmp_path, "decoder")
    torch.manual_seed(4)
    theirs = transformers.AutoModelForCausalLM.from_config(HF_CLASSES["decoder"])
    for name, value in theirs.named_parameters():
        assert torch.equal(workload.initial(f"network.{name}", 4), value)
    assert not torch.equal(
        workload.initial("network.gpt_neox.embed_in.weight", 5), theirs.gpt_neox.embed_in.weight
    )
    with pytest.raises(WorkloadError, match="has no tensor 'tokens'"):
        workload.initial("tokens", 0)


def test_another_class_takes_changes_of_its_own(tmp_path: Path) -> None:
    HF_CLASSES["decoder"].save_pretrained(tmp_path)
    changed = load(
        f"hf:{tmp_path}", "causal_lm", SMALL, changes={"num_hidden_layers": 1}, sequence_length=LENGTH
    )
    assert isinstance(changed.config, HuggingFaceModel)
    assert not any("layers.1." in name for name in changed.shapes)
    with pytest.raises(WorkloadError, match="has no layerz"):
        load(f"hf:{tmp_path}", "causal_lm", SMALL, changes={"layerz": 1}, sequence_length=LENGTH)


def test_another_class_refuses_heads_it_lacks(tmp_path: Path) -> None:
    HF_CLASSES["encoder"].save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match="does not train"):
        load(f"hf:{tmp_path}", "next_sentence", FULL, sequence_length=LENGTH)
