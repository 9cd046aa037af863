"""GGUF files: read by the gguf package, and by transformers as a model and a tokenizer. llama.cpp reads them in
`make test-releases`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from gguf_models import CASES, LLAMA3, SIZES, byte_level, write
from tokenizers import AddedToken

from orchestrator.extensions.gguf import write as gguf_export
from orchestrator.extensions.gguf.write import TEXTS, export_gguf
from workloads.errors import WorkloadError


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
    strips = byte_level()
    strips.add_tokens([AddedToken("<mask>", lstrip=True)])
    strips.save_pretrained(plain)
    refused(plain, "keeps the spaces around them, but '<mask>' of this tokenizer has lstrip")


def test_every_token_that_ends_a_text_is_written(tmp_path: Path) -> None:
    """That of the tokenizer first; llama.cpp stops at three."""
    plain = write(tmp_path / "hf", num_hidden_layers=1)
    about = json.loads((plain / "config.json").read_text())

    def export_with(ends: int | list[int]) -> dict[str, Any]:
        (plain / "config.json").write_text(json.dumps(about | {"eos_token_id": ends}))
        export_gguf(str(plain), str(tmp_path), "f32")
        fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
        names = ("eos", "eot", "eom")
        return {n: fields[key].contents() for n in names if (key := f"tokenizer.ggml.{n}_token_id") in fields}

    assert export_with(0) == {"eos": 0}
    assert export_with([7, 0, 9]) == {"eos": 0, "eot": 7, "eom": 9}
    with pytest.raises(WorkloadError, match="stops at three tokens at most, but 4 end a text"):
        export_with([7, 0, 9, 11])
