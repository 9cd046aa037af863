from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.encoding.vocabulary import first_added

TEXTS = ["the cat sat on the mat. the dog sat on the log.\n" * 20, "naïve façade — 中文 🙂\n"]


def wordpiece(special: list[str]) -> Tokenizer:
    words = [*special, "cat", "##s", "the", "."]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token=special[0]))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(special)
    return made


def test_training_is_reproducible_and_loses_no_text() -> None:
    one, two = (train_bytes(TEXTS, 300, ("<extra_id_0>",)) for _ in range(2))
    assert one == two
    trained = tokenizer.encoder(one)
    for text in [*TEXTS, "unseen: Ω\t\x00 <pad>"]:
        ids = trained.encode(text, add_special_tokens=False).ids
        assert trained.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_first_ids() -> None:
    trained = Tokenizer.from_str(train_bytes(TEXTS, 300, ("<extra_id_0>", "<pad>", "<extra_id_1>")))
    roles = tokenizer.roles_of(trained, {})
    assert roles == {"eos": 0, "pad": 1, "bos": 2, "cls": 3, "sep": 4, "mask": 5, "unk": 6}
    assert tokenizer.sentinels(trained) == [7, 8]
    assert trained.get_vocab_size() == 300


def test_special_tokens_that_stand_in_the_text_are_text() -> None:
    trained = tokenizer.encoder(train_bytes(TEXTS, 300, ()))
    ids = trained.encode("a <|endoftext|> b <mask>", add_special_tokens=False).ids
    assert min(ids) >= len(tokenizer.STANDARD)


def test_a_vocabulary_without_room_for_all_bytes_is_told() -> None:
    tokenizer.check_size(264, ("<extra_id_0>",))
    with pytest.raises(InputError, match="make it at least 264"):
        tokenizer.check_size(263, ("<extra_id_0>",))


def test_a_tokenizer_is_loaded_from_its_file_or_its_folder(tmp_path: Path) -> None:
    text = train_bytes(TEXTS, 300, ())
    (tmp_path / "tokenizer.json").write_text(text)
    by_file = tokenizer.load(str(tmp_path / "tokenizer.json"), ())
    assert by_file == tokenizer.load(str(tmp_path), ())
    assert json.loads(by_file[0]) == json.loads(text)
    assert by_file[1]["eos"] == 0


def test_truncation_and_padding_of_a_loaded_tokenizer_are_off(tmp_path: Path) -> None:
    made = Tokenizer.from_str(train_bytes(TEXTS, 300, ()))
    made.enable_truncation(3)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "tokenizer.json"))
    text, _ = tokenizer.load(str(tmp_path), ())
    assert 3 < len(tokenizer.encoder(text).encode("the cat sat on the mat").ids) < 50


def test_roles_are_found_by_usual_names_and_missing_specials_added(tmp_path: Path) -> None:
    wordpiece(["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]).save(str(tmp_path / "tokenizer.json"))
    text, roles = tokenizer.load(str(tmp_path), ("<mask>", "<extra_id_0>"))
    assert roles == {"unk": 0, "pad": 1, "cls": 2, "sep": 3, "mask": 4, "eos": 3}
    loaded = tokenizer.encoder(text)
    assert tokenizer.sentinels(loaded) == [9]
    assert loaded.token_to_id("<mask>") is None
    assert tokenizer.size_of(loaded) == 10


@pytest.mark.parametrize("entry", ["[END]", {"content": "[END]", "lstrip": False}])
def test_the_configuration_beside_a_tokenizer_names_its_roles(tmp_path: Path, entry: object) -> None:
    wordpiece(["[UNK]", "[SEP]", "[END]"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry, "pad_token": None}))
    assert tokenizer.load(str(tmp_path), ())[1] == {"unk": 0, "sep": 1, "eos": 2}


def test_a_tokenizer_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no tokenizer.json"):
        tokenizer.load(str(tmp_path), ())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"is not a tokenizer.json"):
        tokenizer.load(str(tmp_path), ())
    wordpiece(["[UNK]"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="no token ends a document; name eos_token"):
        tokenizer.load(str(tmp_path), ())


def test_tokens_are_added_behind_all_others_and_found_in_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bytes(["some text"] * 9, 300, ()))
    plain, _ = tokenizer.load(str(path), ["<extra_id_0>"])
    found, roles = tokenizer.load(str(path), ["<extra_id_0>"], ["<call>", "<result>"])
    before, size = (tokenizer.size_of(tokenizer.encoder(text)) for text in (plain, found))
    assert size == before + 2
    assert tokenizer.encoder(found).encode("a<call>b").ids[1:2] == [before]
    assert first_added(Tokenizer.from_str(found), size) <= before
    assert roles["eos"] == 0


IM_END = "<|im_end|>"
CLASSES: dict[str, dict[str, Any]] = {
    "config": {
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "bos_token": {"__type": "AddedToken", "content": "<s>"},
        }
    },
    "map goes first": {
        "tokenizer_config.json": {"eos_token": "</s>"},
        "special_tokens_map.json": {"eos_token": {"content": IM_END}, "pad_token": "<pad>"},
    },
    "map alone": {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": IM_END}},
    "a null in the map": {
        "tokenizer_config.json": {"eos_token": IM_END, "pad_token": "<pad>"},
        "special_tokens_map.json": {"pad_token": None},
    },
    "by default of the class": {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}},
    "of the class and the file": {
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "eos_token": IM_END}
    },
    "more names": {
        "tokenizer_config.json": {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<pad>"}}
    },
}


@pytest.mark.parametrize("title", CLASSES)
def test_roles_are_those_of_the_tokenizer_that_transformers_loads(title: str, tmp_path: Path) -> None:
    """And what it names is a special token, as there."""
    from transformers import AutoTokenizer

    names = ["<unk>", "<s>", "</s>", "▁a", IM_END, "<pad>", "▁", *"<|im_end>"]
    pieces = [(name, -float(number)) for number, name in enumerate(dict.fromkeys(names))]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    for name, content in CLASSES[title].items():
        (tmp_path / name).write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **content}))
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tokenizer.special_tokens_of(str(tmp_path)) == dict(theirs.special_tokens_map)
    text, roles = tokenizer.load(str(tmp_path), ())
    for role in ("eos", "bos", "pad", "unk"):
        named = getattr(theirs, f"{role}_token_id")
        assert named is None or roles[role] == named
    said, eos = f"a{theirs.eos_token}a", theirs.eos_token_id
    read = Tokenizer.from_str(text).encode(said, add_special_tokens=False).ids
    assert read.count(eos) == theirs(said, add_special_tokens=False)["input_ids"].count(eos) == 1


def test_before_format_6_one_file_was_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bytes(["some words"], 300, ()))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<bos>"}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<cls>"}')
    text, roles = tokenizer.load(str(tmp_path), (), (), 5)
    named = Tokenizer.from_str(text)
    assert (roles["eos"], tokenizer.load(str(tmp_path), ())[1]["eos"]) == (
        named.token_to_id("<bos>"),
        named.token_to_id("<cls>"),
    )
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(InputError, match="its eos_token '<gone>' is not in its vocabulary"):
        tokenizer.load(str(tmp_path), ())
