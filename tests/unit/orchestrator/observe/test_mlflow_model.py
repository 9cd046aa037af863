"""An export as MLflow's own readers take it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.observe.registry import write_flavor

WORDS = ["<pad>", "</s>", "<mask>", "a", "class", "is", "good"]
GPT2 = transformers.GPT2Config(
    vocab_size=8, n_positions=32, n_embd=8, n_layer=1, n_head=1, eos_token_id=1, bos_token_id=1
)
BERT = transformers.BertConfig(
    vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
)
T5 = transformers.T5Config(
    vocab_size=8, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0
)


def exported(model: Any, folder: Path) -> Path:
    """The model as an export with its flavour beside it, as it lies in MLflow."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder / "export")
    model.save_pretrained(folder / "export")
    assert write_flavor(str(folder / "export"), str(folder / "flavor"))
    shutil.copytree(folder / "flavor", folder / "export", dirs_exist_ok=True)
    return folder / "export"


def test_a_decoder_generates_and_is_served(tmp_path: Path) -> None:
    import mlflow
    from mlflow.pyfunc import scoring_server
    from starlette.testclient import TestClient

    folder = str(exported(transformers.GPT2LMHeadModel(GPT2), tmp_path))
    (said,) = mlflow.transformers.load_model(folder)("a class", max_new_tokens=2)
    assert said["generated_text"].startswith("a class")
    loaded = mlflow.pyfunc.load_model(folder)
    assert loaded.predict(["a class"])[0].startswith("a class")
    assert loaded.predict(loaded.input_example)
    assert loaded.metadata.signature is not None
    served = TestClient(scoring_server.init(loaded))
    body = Path(folder, "serving_input_example.json").read_text()
    answer = served.post("/invocations", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["predictions"][0].startswith("The first word")


def test_an_encoder_fills_and_classifies(tmp_path: Path) -> None:
    import mlflow

    fills = exported(transformers.BertForMaskedLM(BERT), tmp_path / "masked")
    assert mlflow.transformers.load_model(str(fills))("a <mask> is good")[0]["score"] > 0
    masked = mlflow.pyfunc.load_model(str(fills))
    assert masked.predict(masked.input_example), "the example has the tokenizer's own mask"
    sorts = exported(transformers.BertForSequenceClassification(BERT), tmp_path / "sorted")
    assert mlflow.transformers.load_model(str(sorts))("a class")[0]["label"].startswith("LABEL_")


def test_a_class_without_a_pipeline_gives_its_parts(tmp_path: Path) -> None:
    import mlflow

    folder = str(exported(transformers.T5ForConditionalGeneration(T5), tmp_path))
    parts = mlflow.transformers.load_model(folder, return_type="components")
    assert isinstance(parts["model"], transformers.T5ForConditionalGeneration)
    assert parts["tokenizer"]("a class")["input_ids"] == [3, 4]


@pytest.mark.parametrize("config", [None, "{}"])
def test_what_names_no_class_is_left_as_it_is(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert not write_flavor(str(tmp_path), str(tmp_path / "flavor"))
    assert not (tmp_path / "flavor").exists()
