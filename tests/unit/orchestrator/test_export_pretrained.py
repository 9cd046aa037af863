"""Every kind of pretrained folder with every objective that reads it: its export computes the same in transformers, and
the exported tokenizer gives the tokens that training saw."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_tokenizers import DOCUMENTS
from jobs import job
from prepared import prepare_here
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.encoding import tokenizer as made
from orchestrator.data.encoding.auto_tokenizer import class_to_read
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.data.samples.windows import windows_of
from orchestrator.data.store.tokens import Tokens
from orchestrator.export import hugging_face as export
from orchestrator.resolve.training_inputs import workload_of
from workloads import objectives
from workloads.describe import describe
from workloads.hf.check.compare import TOLERANCE

VOCABULARY = 400
ROWS = [
    ("two words, 1234", "it's  another\ttext"),
    ("", ""),
    ("some more of them", "x"),
    ("a", "b c d e"),
] * 6
LABELS = ["bad", "good", "odd"]


def _byte_level(framed: bool) -> Tokenizer:
    """Like GPT-2's, or with the frame of RoBERTa's and BART's."""
    whole = Tokenizer.from_str(train_bytes(DOCUMENTS, VOCABULARY, ()))
    if framed:
        whole.post_processor = processors.RobertaProcessing(
            ("<sep>", 4), ("<cls>", 3), add_prefix_space=False
        )
    return whole


def _with_bos() -> Tokenizer:
    """Like Llama 3's: a token before every text."""
    whole = _byte_level(False)
    whole.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 2)]
    )
    return whole


def _word_piece() -> Tokenizer:
    """Like BERT's."""
    whole = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    whole.normalizer = normalizers.BertNormalizer(lowercase=True)
    whole.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    whole.decoder = decoders.WordPiece()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    whole.train_from_iterator(
        DOCUMENTS, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=marks, show_progress=False)
    )
    whole.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return whole


def _unigram() -> Tokenizer:
    """Like T5's: the end after every text."""
    whole = Tokenizer(models.Unigram())
    whole.normalizer = normalizers.NFKC()
    whole.pre_tokenizer = pre_tokenizers.Metaspace()
    whole.decoder = decoders.Metaspace()
    marks = ["<pad>", "</s>", "<unk>", "<mask>"]
    whole.train_from_iterator(
        DOCUMENTS,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=marks, unk_token="<unk>", show_progress=False),
    )
    whole.add_special_tokens([f"<extra_id_{i}>" for i in range(100)])
    whole.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return whole


NAMED = {
    "plain": {"eos_token": "<|endoftext|>", "pad_token": "<pad>"},
    "bos": {"eos_token": "<|endoftext|>", "bos_token": "<bos>", "pad_token": "<pad>"},
    "roberta": {"eos_token": "<sep>", "bos_token": "<cls>", "cls_token": "<cls>", "sep_token": "<sep>",
                "pad_token": "<pad>", "mask_token": "<mask>"},
    "bert": {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]",
             "unk_token": "[UNK]"},
    "t5": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
}  # fmt: skip
DECODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "max_position_embeddings": 130}  # fmt: skip
PAIR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_position_embeddings": 128}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
PAIRS = ("t5", "mt5", "bart", "mbart", "pegasus")
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gpt2": (transformers.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}, "plain"),
    "llama": (transformers.LlamaConfig, DECODER, "bos"),
    "qwen2": (transformers.Qwen2Config, DECODER, "plain"),
    "qwen3": (transformers.Qwen3Config, DECODER | {"head_dim": 8}, "plain"),
    "mistral": (transformers.MistralConfig, DECODER, "bos"),
    "phi3": (transformers.Phi3Config, DECODER, "bos"),
    "olmo2": (transformers.Olmo2Config, DECODER, "plain"),
    "gemma2": (transformers.Gemma2Config, DECODER | {"head_dim": 8}, "bos"),
    "mixtral": (transformers.MixtralConfig, DECODER | {"num_local_experts": 2}, "bos"),
    "gpt_neox": (transformers.GPTNeoXConfig, ENCODER, "plain"),
    "stablelm": (transformers.StableLmConfig, DECODER, "plain"),
    "bert": (transformers.BertConfig, ENCODER, "bert"),
    "distilbert": (transformers.DistilBertConfig, {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}, "bert"),
    "electra": (transformers.ElectraConfig, ENCODER | {"embedding_size": 16}, "bert"),
    "albert": (transformers.AlbertConfig, ENCODER | {"embedding_size": 16}, "bert"),
    "roberta": (transformers.RobertaConfig, ENCODER | {"type_vocab_size": 1}, "roberta"),
    "xlm-roberta": (transformers.XLMRobertaConfig, ENCODER | {"type_vocab_size": 1}, "roberta"),
    "mpnet": (transformers.MPNetConfig, ENCODER, "roberta"),
    "deberta-v2": (transformers.DebertaV2Config, ENCODER | {"relative_attention": True, "position_buckets": 16,
                   "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "share_att_key": True,
                   "position_biased_input": False, "type_vocab_size": 0}, "bert"),
    "camembert": (transformers.CamembertConfig, ENCODER | {"type_vocab_size": 1}, "roberta"),
    "modernbert": (transformers.ModernBertConfig, ENCODER, "bert"),
    "t5": (transformers.T5Config, T5, "t5"),
    "mt5": (transformers.MT5Config, T5, "t5"),
    "bart": (transformers.BartConfig, PAIR, "roberta"),
    "mbart": (transformers.MBartConfig, PAIR, "roberta"),
    "pegasus": (transformers.PegasusConfig, PAIR, "t5"),
}  # fmt: skip
TOKENIZERS = {"plain": lambda: _byte_level(False), "bos": _with_bos, "roberta": lambda: _byte_level(True),
              "bert": _word_piece, "t5": _unigram}  # fmt: skip
FIELDS: dict[str, Any] = {
    "sequence_classification": {"text": "first", "label": "label"},
    "two texts": {"text": "first", "pair": "second", "label": "label"},
    "regression": {"text": "first", "label": "value"},
    "span_extraction": {"question": "second", "context": "first", "answer": "answer", "start": "start"},
    "seq2seq": {"source": "first", "target": "second"},
}
ASKED = {
    "causal_lm": "causal_lm", "masked_lm": "masked_lm", "denoising": "denoising", "span_corruption": "span_corruption",
    "sequence_classification": "sequence_classification", "two texts": "sequence_classification",
    "regression": "regression", "span_extraction": "span_extraction", "seq2seq": "seq2seq",
}  # fmt: skip
"""The objective of each case."""
WHOLE = ("seq2seq", "span_extraction")
"""Cases whose records have no empty texts; a second text is never empty."""
NO_CLASS = {
    **dict.fromkeys(("phi3", "olmo2", "gemma2", "stablelm"), ("span_extraction",)),
    "pegasus": ("span_extraction", "sequence_classification", "regression"),
}
"""Objectives for which transformers has no class, by kind."""
QUICK = {("qwen2", "causal_lm"), ("llama", "sequence_classification"), ("bert", "two texts"), ("roberta", "masked_lm"),
         ("gpt_neox", "two texts"), ("bart", "seq2seq"), ("t5", "span_corruption"),
         ("bert", "span_extraction"), ("t5", "sequence_classification")}  # fmt: skip


def _cases() -> Iterator[Any]:
    for kind in KINDS:
        for case, objective in ASKED.items():
            if kind in PAIRS:
                fits = "encoder-decoder"
            else:
                fits = (
                    "decoder"
                    if KINDS[kind][1] is DECODER or KINDS[kind][2] in ("plain", "bos")
                    else "encoder"
                )
            if fits not in objectives.architectures(objective):
                continue
            if (objective == "span_corruption") != (KINDS[kind][2] == "t5") and objective in CORRUPTED:
                continue
            if objective in NO_CLASS.get(kind, ()):
                continue
            marks = [] if (kind, case) in QUICK else [pytest.mark.slow]
            yield pytest.param(kind, case, marks=marks, id=f"{kind}-{case}")


CORRUPTED = ("span_corruption", "denoising")
"""Objectives of pairs that need sentinels, or a token before a text."""


def _is_record(case: str, first: str, second: str) -> bool:
    return bool(second if case == "two texts" else first and second if case in WHOLE else True)


def folder_of(kind: str, place: Path) -> Path:
    """A pretrained folder of a kind, with weights and a tokenizer."""
    config_class, changes, named = KINDS[kind]
    tokenizer = TOKENIZERS[named]()
    size = tokenizer.get_vocab_size()
    roles = {
        f"{role}_id": tokenizer.token_to_id(token)
        for role, token in NAMED[named].items()
        if role not in ("cls_token", "mask_token", "unk_token")
    }
    extra = {"decoder_start_token_id": roles["pad_token_id"]} if kind in PAIRS else {}
    more = {"cls_token_id": 2, "sep_token_id": 3} if kind == "modernbert" else {}
    config = config_class(**changes, vocab_size=size, **{**roles, **more, **extra})
    auto = {
        "encoder-decoder": transformers.AutoModelForSeq2SeqLM, "encoder": transformers.AutoModelForMaskedLM,
        "decoder": transformers.AutoModelForCausalLM,
    }  # fmt: skip
    torch.manual_seed(1)
    config.save_pretrained(place)
    auto[describe(f"hf:{place}").architecture].from_config(config).save_pretrained(place)
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps(NAMED[named]))
    return place


def spec_of(folder: Path, case: str) -> JobSpec:
    document = job(str(folder / "rows.jsonl"))
    objective, field = ASKED[case], FIELDS.get(case, "first")
    document["workload"] = {"model": f"hf:{folder}", "objective": objective}
    if objective == "seq2seq" and json.loads((folder / "config.json").read_text())["model_type"] == "mbart":
        document["workload"]["options"] = {"start": 1}  # a target's own end says another token
    rows = [
        {"first": one if case in FIELDS else one + " " + DOCUMENTS[n % 9], "second": two, "label": LABELS[n % 3],
         "value": n / 10, "answer": one[:1], "start": 0}
        for n, (one, two) in enumerate(ROWS) if _is_record(case, one, two)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document["data"] = {
        "sources": [{"uri": str(folder / "rows.jsonl"), "field": field}], "tokenizer": str(folder),
        "sequence_length": 64, "labels": LABELS if objective == "sequence_classification" else [],
    }  # fmt: skip
    return parse(document)


def rows_of_training(tokens: Tokens, workload: Any) -> list[list[int]]:
    """The tokens of the first records, as training reads them, without padding."""
    windows = [windows_of(tokens, source, workload.objective.windowing) for source in range(tokens.sources)]
    batch = SampleReader(tokens, windows, workload.objective).collate(range(min(4, len(windows[0]))), 0)
    return [row[real].tolist() for row, real in zip(batch["tokens"], batch["padding"], strict=True)]


@pytest.mark.proves("export", objective={"case": ASKED}, family="kind")
@pytest.mark.parametrize(("kind", "case"), list(_cases()))
def test_what_came_in_leaves_as_it_computes_and_reads(kind: str, case: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "in")
    spec = spec_of(folder, case)
    tokens = Tokens.open(prepare_here(spec, str(tmp_path / "cache")))
    workload = workload_of(spec.workload, spec.data, spec.train, spec.seed, tokens)
    workload.check_hf()
    read = {name: workload.initial(name, 3) for name in workload.shapes}.__getitem__
    (tmp_path / "out").mkdir()
    apart = export.write(
        tokens,
        workload,
        read,
        str(tmp_path / "out"),
        spec=spec.workload,
        data=spec.data,
        seed=spec.seed,
        own_code=spec.own_code,
    )
    assert apart is not None
    assert apart <= TOLERANCE
    shutil.rmtree(folder)  # what left needs nothing of it
    reader = class_to_read(str(tmp_path / "out")) or "AutoTokenizer"
    loaded = getattr(transformers, reader).from_pretrained(tmp_path / "out")
    if case in FIELDS:
        texts = [(one, two) for one, two in ROWS if _is_record(case, one, two)]
        asked: list[tuple[str, ...]] = [(one,) for one, _ in texts]
        if case == "two texts":
            asked = list(texts)
        elif case == "span_extraction":
            asked = [(two, one) for one, two in texts]
        for text, seen in zip(asked, rows_of_training(tokens, workload), strict=False):
            assert loaded(*text)["input_ids"] == seen, text
        return
    roles, objective = tokens.manifest.roles, workload.objective
    begins, ends = ([roles[role]] if role else [] for role in (objective.begins, objective.ends))
    for text in ("two words, 1234", "it's  another\ttext", ""):
        plain = made.encoder(tokens.tokenizer().to_str()).encode(text, add_special_tokens=False).ids
        found = loaded(text)["input_ids"]
        assert loaded(text, add_special_tokens=False)["input_ids"] == plain
        if objective.begins or objective.ends:
            assert found == [*begins, *plain, *ends]
