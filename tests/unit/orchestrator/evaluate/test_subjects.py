"""What is evaluated has the tokenizer of training, whatever class transformers takes for its model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from orchestrator.data.encoding.auto_tokenizer import class_to_read, probes
from orchestrator.data.encoding.training import train_bytes
from orchestrator.evaluate.lm_eval_model import WorkloadLM
from orchestrator.evaluate.on_tasks import subject_of_export
from orchestrator.export.target import MARK


class Request:
    """What lm-eval asks the likelihood of."""

    def __init__(self, text: str) -> None:
        self.args = (text,)


def test_an_export_is_evaluated_on_the_tokens_of_its_file(tmp_path: Path) -> None:
    text = "1234567 it's  (x_1)\n\n  9876543"
    whole = Tokenizer.from_str(train_bytes([Path(__file__).read_text(), "1234567 9876543 " * 50], 400, ()))
    PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    facts = {"objective": "causal_lm", "sequence_length": 64, "global_batch": 2}
    (tmp_path / MARK).write_text(json.dumps({"evaluation": facts}))
    assert class_to_read(str(tmp_path)), "AutoTokenizer reads the file now"
    subject = subject_of_export(str(tmp_path))
    for each in probes(whole):
        assert subject.tokenizer.encode(each) == whole.encode(each).ids
        ids = whole.encode(each).ids
        assert subject.tokenizer.decode(ids) == whole.decode(ids, skip_special_tokens=False)
    ids = whole.encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) != ids
    told = WorkloadLM(subject.workload, subject.model, subject.tokenizer, lambda: None)
    (likelihood,) = told.loglikelihood_rolling([Request(text)])
    with torch.no_grad():
        logits = model(torch.tensor([[0, *ids]])).logits[0, :-1].log_softmax(-1)
    assert abs(likelihood - float(logits[torch.arange(len(ids)), ids].sum())) < 1e-3
