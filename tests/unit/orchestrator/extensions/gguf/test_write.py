"""GGUF files: read by the gguf package, by transformers as a model and a tokenizer, and by llama.cpp where that is."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from orchestrator.extensions.gguf import write as gguf_export
from orchestrator.extensions.gguf.write import _CUTS, TEXTS, export_gguf
from workloads.errors import WorkloadError

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3.1, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def byte_level(cut: str = "gpt-2", frame: str = "") -> transformers.PreTrainedTokenizerFast:
    """A small tokenizer that cuts text in a way that llama.cpp has a name for."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=cut == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut == "gpt-2")
    tokenizer.pre_tokenizer, tokenizer.decoder = whole, decoders.ByteLevel()
    if cut != "gpt-2":
        expression = next(e for e, name in _CUTS.items() if name == cut)
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|begin|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    if frame:
        tokens = [(name, tokenizer.token_to_id(name)) for name in special]
        tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=tokens)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|begin|>"
    )


def write(folder: Path, kind: str = "llama", cut: str = "gpt-2", frame: str = "", **changes: Any) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    )
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
    byte_level(cut, frame).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_same_model(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    plain = write(tmp_path / "hf", kind, **changes)
    assert export_gguf(str(plain), str(tmp_path), "f32") == 0
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    names = {tensor.name for tensor in reader.tensors}
    assert ("output.weight" in names) == (not changes.get("tie_word_embeddings"))
    assert ("rope_freqs.weight" in names) == (case == "llama-3.1, tied")
    assert ("blk.1.attn_q_norm.weight" in names) == (kind == "qwen3")
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    given = transformers.AutoConfig.from_pretrained(plain)
    for name in (
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
    ):
        assert getattr(config, name) == pytest.approx(getattr(given, name)), name


@pytest.mark.parametrize(("numbers", "most"), [("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 3e-2)])
def test_rounded_numbers(numbers: str, most: float, tmp_path: Path) -> None:
    plain = write(tmp_path / "hf", intermediate_size=80)  # of which q8_0 makes no blocks
    told = export_gguf(str(plain), str(tmp_path), numbers)  # type: ignore[arg-type]
    assert 0 < told < most
    kinds = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.attn_q.weight"] == numbers.upper()
    assert kinds["blk.0.ffn_down.weight"] == ("F16" if numbers == "q8_0" else numbers.upper())


def test_another_model_in_the_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write(tmp_path / "hf")
    monkeypatch.setattr(gguf_export, "to_pairs", lambda tensor, head: tensor)
    with pytest.raises(RuntimeError, match=r"transformers reads a model from model\.gguf that differs by"):
        export_gguf(str(plain), str(tmp_path), "f32")


@pytest.mark.parametrize(
    ("cut", "frame", "begins", "ends"),
    [
        ("gpt-2", "$A <|endoftext|>", False, True),
        ("llama-bpe", "<|begin|> $A", True, False),
        ("qwen2", "", False, False),
    ],
)
def test_the_tokenizer_is_the_same(cut: str, frame: str, begins: bool, ends: bool, tmp_path: Path) -> None:
    plain = write(tmp_path / "hf", "qwen2", cut, frame, num_hidden_layers=1)
    (plain / "chat_template.jinja").write_text("{{ messages }}")
    export_gguf(str(plain), str(tmp_path), "f32")
    wanted = transformers.PreTrainedTokenizerFast.from_pretrained(plain)
    found = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in (*TEXTS, "Isn't IT 2024?<|endoftext|> ok"):
        one, other = (each(text, add_special_tokens=False)["input_ids"] for each in (found, wanted))
        assert one == other, text
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    about = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    assert (about["pre"], about["add_bos_token"], about["add_eos_token"]) == (cut, begins, ends)
    assert (about["eos_token_id"], about["bos_token_id"]) == (wanted.eos_token_id, wanted.bos_token_id)
    assert about["tokens"][319] == "[PAD319]"
    assert about["token_type"][0] == gguf.TokenType.CONTROL
    assert about["tokenizer.chat_template"] == "{{ messages }}"


def refused(folder: Path, match: str) -> None:
    with pytest.raises(WorkloadError, match=match):
        export_gguf(str(folder), str(folder.parent), "f32")
    assert not (folder.parent / "model.gguf").exists()


def test_models_that_llama_cpp_computes_otherwise_are_refused(tmp_path: Path) -> None:
    for name, kind, changes, match in (
        ("window", "mistral", {"sliding_window": 16}, "attends to all positions in a mistral"),
        ("bias", "llama", {"attention_bias": True}, "with more biases"),
        (
            "yarn",
            "qwen3",
            {"rope_parameters": {**LLAMA3, "rope_type": "yarn"}},
            "no rotary positions of type yarn",
        ),
        (
            "kind",
            "gpt2",
            {},
            "supports language models of llama, mistral, qwen2, qwen3, but this is GPT2LMHead",
        ),
    ):
        folder = tmp_path / name / "hf"
        transformers.AutoConfig.for_model(kind, **(SIZES | changes)).save_pretrained(folder)
        about = json.loads((folder / "config.json").read_text())
        named = "GPT2LMHeadModel" if kind == "gpt2" else "XForCausalLM"
        (folder / "config.json").write_text(json.dumps(about | {"architectures": [named]}))
        refused(folder, match)


def test_tokenizers_that_llama_cpp_lacks_are_refused(tmp_path: Path) -> None:
    plain = write(tmp_path / "one" / "hf", num_hidden_layers=1)
    whole = json.loads((plain / "tokenizer.json").read_text())
    for changes, match in (
        ({"normalizer": {"type": "Lowercase"}}, "splits text as GPT-2, Llama 3 or Qwen 2 do"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True, "trim_offsets": True}},
         "splits text as GPT-2"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "byte-level BPE, but this tokenizer is of another kind"),
    ):  # fmt: skip
        (plain / "tokenizer.json").write_text(json.dumps(whole | changes))
        refused(plain, match)
    byte_level(frame="<|begin|> $A <|begin|>").save_pretrained(plain)
    refused(plain, "adds tokens other than bos and eos around a text")


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed: nothing was compared"
)
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    import llama_cpp

    kind, changes = CASES[case]
    cut = {"qwen2": "qwen2", "mistral": "llama-bpe"}.get(kind, "gpt-2")  # of Qwen 3 that of GPT-2
    plain = write(tmp_path / "hf", kind, cut, **changes)
    export_gguf(str(plain), str(tmp_path), "f32")
    full = llama_cpp.GGML_TYPE_F32
    theirs = llama_cpp.Llama(
        str(tmp_path / "model.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1, type_k=full, type_v=full,
        flash_attn=False,
    )  # fmt: skip
    tokens = list(range(5, 105))
    theirs.eval(tokens)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    apart = np.abs(theirs.scores[: len(tokens)] - wanted).max() / np.abs(wanted).max()
    assert apart < 1e-4
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(plain)
    for text in (*TEXTS, "Isn't IT 2024?<|endoftext|> ok"):
        found = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert found == tokenizer(text, add_special_tokens=False)["input_ids"], text
