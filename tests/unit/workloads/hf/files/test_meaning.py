"""What a pretrained folder says of how a text begins and ends, compared with what transformers does with the folder."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from thin import every
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as CLASSES

from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.vocabulary import frame_of
from workloads.errors import WorkloadError
from workloads.hf.check.compare import load as load_theirs
from workloads.hf.files.meaning import BY_INNER_BOS, BY_LAST_TOKEN, folder_meaning
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.processors import APPLIED, not_applied
from workloads.objectives.samples import Samples
from workloads.record_format import pack
from workloads.workload import Frame, Sampling, Vocabulary, Workload

SIZE, LENGTH = 97, 24
FRAME = Frame(((0,), (2,)), ((0,), (2,), (2,)), False)
KNOWN = Vocabulary(SIZE, eos=2, pad=1, bos=0, frame=FRAME)
BART = {
    "vocab_size": SIZE, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "init_std": 0.3,
}  # fmt: skip
T5 = {
    "vocab_size": SIZE, "d_model": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 64,
    "dropout_rate": 0.0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 5,
}  # fmt: skip
PAIRS: dict[str, dict[str, Any]] = {
    "bart": {**BART, "decoder_start_token_id": 7},
    "mbart": BART,
    "pegasus": {**BART, "decoder_start_token_id": 9},
    "t5": T5,
    "mt5": T5,
    "switch_transformers": {**T5, "num_experts": 2, "expert_capacity": 64, "num_layers": 2,
                            "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "m2m_100": {**BART, "decoder_start_token_id": 2},
    "marian": {**BART, "decoder_start_token_id": 3},
    "blenderbot": {**BART, "decoder_start_token_id": 0},
    "blenderbot-small": {**BART, "decoder_start_token_id": 0},
    "mvp": {**BART, "decoder_start_token_id": 2},
    "plbart": BART,
    "led": {**BART, "decoder_start_token_id": 2, "attention_window": 8, "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64},
    "bigbird_pegasus": {**BART, "decoder_start_token_id": 4, "attention_type": "original_full"},
    "pegasus_x": {**BART, "decoder_start_token_id": 4, "block_size": 8, "num_global_tokens": 4},
    "umt5": T5,
    "longt5": T5,
}  # fmt: skip
QUICK = ("bart", "mbart", "t5", "m2m_100", "marian")
PROMPTS = [[0, 7, 8, 9, 10, 2], [0, 11, 2], [0, 12, 13, 14, 2]]


def words(number: int, least: int, most: int) -> np.ndarray:
    draw = np.random.default_rng(number)
    return draw.integers(8, SIZE, draw.integers(least, most))


def a_pair(number: int) -> np.ndarray:
    return pack([words(number, 3, 30), words(number + 999, 1, 30)])


def written(folder: Path, kind: str, **more: Any) -> Any:
    """A folder with a model of that kind, as transformers loads it."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{**PAIRS.get(kind, {}), **more})
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(folder)
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def settled(folder: Path, **settings: Any) -> None:
    """Settings in the folder's generation_config.json."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def ours(folder: Path, known: Vocabulary = KNOWN, **more: Any) -> tuple[Workload, nn.Module]:
    workload = load(f"hf:{folder}", "seq2seq", known, sequence_length=LENGTH, **more)
    return workload, with_weights(workload, lambda name: workload.initial(name, 0))


def theirs_say(model: Any, prompts: list[list[int]], room: int = 9) -> list[list[int]]:
    """What transformers says after each prompt, greedily, up to what ends it."""
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        row = model.generate(tokens, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=room)[
            0
        ]
        found.append(row[1 if model.config.is_encoder_decoder else len(prompt) :].tolist())
    return found


def exported(workload: Workload, model: nn.Module, folder: Path) -> Any:
    workload.to_hf(model.state_dict().__getitem__, str(folder))
    return load_theirs(str(folder), strict=False)


def check_agree(folder: Path) -> None:
    """What both files of an export say is the same."""
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    settings = json.loads((folder / "generation_config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
    for name in names:
        both = {json.dumps(found.get(name)) for found in (config, settings)} - {"null"}
        assert len(both) < 2, (name, both)


@pytest.mark.proves("loss", objective="seq2seq", family="kind")
@pytest.mark.proves("generate", objective="seq2seq", family="kind")
@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in PAIRS]
)
def test_the_first_loss_and_the_text_of_the_export_are_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    theirs = written(tmp_path / "in", kind)
    workload, model = ours(tmp_path / "in")
    batch = workload.objective.collate(Samples(a_pair, 100), range(6), 0)
    found = workload.loss(model, batch)
    with torch.no_grad():
        told = theirs(
            input_ids=batch["tokens"], attention_mask=batch["padding"].long(), labels=batch["labels"].clone()
        )
    torch.testing.assert_close(found.total / found.count, told.loss, rtol=1e-5, atol=1e-5)
    again = exported(workload, model, tmp_path / "out")
    check_agree(tmp_path / "out")
    assert workload.generate(model, PROMPTS, 9, Sampling()) == theirs_say(again, PROMPTS)


def shifted(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """What the decoder of transformers reads where it is given labels alone."""
    if hasattr(type(model), "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    shift = sys.modules[type(model).__module__].shift_tokens_right
    return shift(labels, 1, model.config.decoder_start_token_id)


@pytest.mark.slow
def test_the_tables_of_classes_are_what_their_training_does() -> None:
    """Asked without weights: each class itself says what its decoder reads for some labels."""
    for kind, name in CLASSES.items():
        made = getattr(transformers, name)
        if kind not in PAIRS and kind not in BY_LAST_TOKEN | {"encoder-decoder", "nllb-moe"}:
            continue
        bare = made.__new__(made)
        bare.__dict__["config"] = transformers.PreTrainedConfig(pad_token_id=1)
        bare.__dict__["config"].decoder_start_token_id = 3
        read = shifted(bare, torch.tensor([[7, 8, 9], [5, 6, 4]]))
        last = read[:, 0].tolist() == [9, 4]
        assert last or read[:, 0].tolist() == [3, 3], kind
        assert last == (kind in BY_LAST_TOKEN), kind
    assert {k for k in CLASSES if k.startswith("t5gemma")} == BY_INNER_BOS


def test_a_run_of_an_earlier_version_begins_as_it_did(tmp_path: Path) -> None:
    written(tmp_path, "bart")
    workload, _ = ours(tmp_path, rule=5)
    assert workload.decoder_start == 1
    assert ours(tmp_path)[0].decoder_start == 7
    assert ours(tmp_path, options={"start": 4})[0].decoder_start == 4


def test_two_beginnings_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "bart")
    settled(tmp_path, decoder_start_token_id=2)
    with pytest.raises(
        WorkloadError, match=r"config.json says 7 and generation_config.json says 2; name one"
    ):
        ours(tmp_path)
    workload, model = ours(tmp_path, options={"start": 2})
    exported(workload, model, tmp_path / "out")
    check_agree(tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").decoder_start_token_id == 2


def test_a_beginning_that_is_no_token_of_the_model_is_refused_where_a_text_is_said(tmp_path: Path) -> None:
    written(tmp_path, "bart", decoder_start_token_id=SIZE)
    with pytest.raises(WorkloadError, match=r"begins with token 97, and the model has 97; fix decoder_start"):
        ours(tmp_path)
    load(f"hf:{tmp_path}", "sequence_classification", KNOWN, sequence_length=LENGTH, labels=("a", "b"))


# -- languages


LANGUAGES = {
    "mbart": ("MBartTokenizer", "mbart", "en_XX", "ro_RO"),
    "mbart50": ("MBart50Tokenizer", "mbart", "en_XX", "ro_RO"),
    "nllb": ("NllbTokenizer", "m2m_100", "eng_Latn", "ron_Latn"),
}
TEXT = "a b a", "b a"


def with_tokenizer(folder: Path, name: str, **more: Any) -> tuple[Any, Vocabulary]:
    """Their tokenizer of two words, and our vocabulary of it."""
    made, _, source, _ = LANGUAGES[name]
    theirs = getattr(transformers, made)
    entries = [
        ("<s>", 0.0),
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁a", -1.0),
        ("▁b", -1.0),
    ]
    try:
        found = theirs(vocab=entries, src_lang=source, **more)
    except Exception:  # of byte pairs
        entries = {token: number for number, (token, _) in enumerate([*entries, ("a", 0), ("b", 0)])}
        found = theirs(vocab=entries, merges=[("▁", "a"), ("▁", "b")], src_lang=source, **more)
    found.save_pretrained(folder)
    text, roles = tokenizer.load(str(folder), ())
    roles.pop("unk", None)
    made_here = tokenizer.Tokenizer.from_str(text)
    return found, Vocabulary(tokenizer.size_of(made_here), **roles, frame=frame_of(made_here))


def a_record(theirs: Any) -> np.ndarray:
    return pack([theirs(text, add_special_tokens=False)["input_ids"] for text in TEXT])


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_target_is_framed_in_its_language(name: str, tmp_path: Path) -> None:
    _, kind, _, target = LANGUAGES[name]
    theirs, known = with_tokenizer(tmp_path, name, tgt_lang=target)
    start = {"decoder_start_token_id": 2} if name != "mbart" else {}
    model = written(tmp_path, kind, **{**BART, "vocab_size": known.size, **start})
    workload, network = ours(tmp_path, known)
    batch = workload.objective.collate(Samples(lambda _: a_record(theirs), 1), [0], 0)
    given = theirs(TEXT[0], text_target=TEXT[1], return_tensors="pt")
    shown = batch["padding"][0].sum(), batch["decoder_padding"][0].sum()
    assert batch["tokens"][0, : shown[0]].tolist() == given["input_ids"][0].tolist()
    assert batch["labels"][0, : shown[1]].tolist() == given["labels"][0].tolist()
    read = shifted(model, given["labels"])
    assert batch["decoder_tokens"][0, : shown[1]].tolist() == read[0].tolist()
    language = theirs.convert_tokens_to_ids(target)
    again = exported(workload, network, tmp_path / "out")
    check_agree(tmp_path / "out")
    begun = again.generation_config.forced_bos_token_id, again.generation_config.decoder_start_token_id
    assert begun == ((None, language) if name == "mbart" else (language, 2))
    prompt = [given["input_ids"][0].tolist()]
    assert workload.generate(network, prompt, 5, Sampling()) == theirs_say(again, prompt, 5)


def test_a_language_that_nobody_names_is_asked_for(tmp_path: Path) -> None:
    theirs, known = with_tokenizer(tmp_path, "nllb")
    written(tmp_path, "m2m_100", **{**BART, "vocab_size": known.size, "decoder_start_token_id": 2})
    with pytest.raises(WorkloadError, match="nothing names the language of a target; name it as tgt_lang"):
        ours(tmp_path, known)
    language = theirs.convert_tokens_to_ids("ron_Latn")
    settled(tmp_path, forced_bos_token_id=language)
    assert ours(tmp_path, known)[0].objective.around_target[0] == (language,)  # type: ignore[attr-defined]
    _, other = with_tokenizer(tmp_path, "nllb", tgt_lang="deu_Latn")
    with pytest.raises(WorkloadError, match="two target languages: tgt_lang of the tokenizer is"):
        ours(tmp_path, other)


def test_a_forced_token_with_which_no_target_begins_is_left_out_with_a_line(tmp_path: Path) -> None:
    written(tmp_path, "bart")
    settled(tmp_path, forced_bos_token_id=0)
    workload, _ = ours(tmp_path)
    assert workload.notes == ()
    assert workload.generation.settings["forced_bos_token_id"] == 0
    bare = Vocabulary(SIZE, eos=2, pad=1, bos=0)
    workload, _ = ours(tmp_path, bare)
    assert "forces answers to begin with token 0, but targets here do not begin with it" in workload.notes[0]
    assert "forced_bos_token_id" not in workload.generation.settings


# -- settings


SETTINGS: dict[str, Any] = {
    "sequence_bias": [[[40], 1.5], [[41, 42], -2.0]],
    "encoder_repetition_penalty": 1.2,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[50], [51, 52]],
    "min_length": 6,
    "min_new_tokens": 5,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": [4, 1.1],
    "suppress_tokens": [60, 61],
    "begin_suppress_tokens": [62],
}
LLAMA = {
    "vocab_size": SIZE, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 0,
    "initializer_range": 0.5,
}  # fmt: skip


def loud(kind: str, folder: Path, implementation: Any) -> tuple[Workload, nn.Module]:
    """A model that generates, of our own class or of theirs."""
    if kind == "llama":
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
        objective = "causal_lm"
    else:
        written(folder, kind)
        objective = "seq2seq"
    settled(folder)
    settled(folder, **SETTINGS)
    given = {"sequence_length": LENGTH, "implementation": implementation}
    workload = load(f"hf:{folder}", objective, KNOWN, **given)
    return workload, with_weights(workload, lambda name: workload.initial(name, 0))


@pytest.mark.contract
@pytest.mark.parametrize("implementation", every(2, ["auto", "transformers"]))
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_the_settings_of_a_folder_are_applied(kind: str, implementation: str, tmp_path: Path) -> None:
    """All at once, and each alone; of the folder itself and of the export."""
    assert [*SETTINGS] == [*APPLIED]
    folder = tmp_path / "in"
    workload, model = loud(kind, folder, implementation)
    again = exported(workload, model, tmp_path / "out")
    check_agree(tmp_path / "out")
    plain = set()
    for names in ([*SETTINGS], *([name] for name in SETTINGS), []):
        chosen = {name: SETTINGS[name] for name in names}
        settings = {**workload.generation.settings, **dict.fromkeys(SETTINGS), **chosen}
        changed = replace(workload.generation, settings=settings)
        spoken = replace(workload, generation=changed)  # type: ignore[type-var]
        for name in SETTINGS:
            setattr(again.generation_config, name, chosen.get(name))
        found = spoken.generate(model, PROMPTS, 9, Sampling())
        assert found == theirs_say(again, PROMPTS), names
        plain.add(json.dumps(found))
    assert len(plain) > 5  # they do something


def test_settings_leave_with_the_export(tmp_path: Path) -> None:
    written(tmp_path / "in", "bart")
    settled(tmp_path / "in", do_sample=True, temperature=0.5, of_others="kept")
    workload, model = ours(tmp_path / "in")
    exported(workload, model, tmp_path / "out")
    found, before = (
        json.loads((tmp_path / place / "generation_config.json").read_text()) for place in ("out", "in")
    )
    assert {name: found[name] for name in ("do_sample", "temperature", "of_others")} == {
        "do_sample": True, "temperature": 0.5, "of_others": "kept",
    }  # fmt: skip
    assert found["decoder_start_token_id"] == before["decoder_start_token_id"] == 7


def test_what_is_not_applied_is_named(tmp_path: Path) -> None:
    written(tmp_path, "bart")
    settled(tmp_path, do_sample=True, temperature=0.6, top_k=50, num_beams=4, repetition_penalty=1.1)
    assert "says do_sample, temperature, num_beams, which" in not_applied(ours(tmp_path)[0].generation)
    settled(tmp_path, do_sample=False, temperature=1.0, num_beams=1)
    assert not_applied(ours(tmp_path)[0].generation) == ""


def test_settings_of_an_old_configuration_are_those_that_transformers_reads(tmp_path: Path) -> None:
    written(tmp_path, "bart")
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "no_repeat_ngram_size": 3, "num_beams": 4}))
    found = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).generation_config
    settings = folder_meaning(str(tmp_path)).settings
    assert {name: getattr(found, name) for name in settings} == settings
    assert settings["no_repeat_ngram_size"] == 3


def test_settings_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "bart")
    settled(tmp_path, no_repeat_ngram_size=-1)
    workload, model = ours(tmp_path)
    with pytest.raises(WorkloadError, match="transformers does not take the generation settings"):
        workload.generate(model, PROMPTS, 4, Sampling())
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(WorkloadError, match="cannot be read"):
        ours(tmp_path)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_each_of_several_ends_ends_a_text_here_and_in_the_export(implementation: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    given: dict[str, Any] = {"sequence_length": LENGTH, "implementation": implementation}
    workload = load(f"hf:{tmp_path}", "causal_lm", KNOWN, **given)
    model = with_weights(workload, lambda name: workload.initial(name, 0))
    whole = workload.generate(model, PROMPTS, 9, Sampling())
    settled(tmp_path, eos_token_id=[2, whole[0][3]])
    workload = load(f"hf:{tmp_path}", "causal_lm", KNOWN, **given)
    ended = replace(workload, generation=workload.generation.ending(whole[1][5]))
    again = exported(ended, model, tmp_path / "out")
    check_agree(tmp_path / "out")
    assert again.config.eos_token_id == [2, whole[0][3], whole[1][5]]
    found = ended.generate(model, PROMPTS, 9, Sampling())
    assert found == theirs_say(again, PROMPTS)
    assert len(found[0]) <= 4
