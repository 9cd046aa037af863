"""An adapter of peft in place of a model: refused with a command that makes the model of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from workloads.errors import WorkloadError
from workloads.hf.convert.folder import describe_folder
from workloads.hf.files.weight_names import check_none_unread
from workloads.inference import with_weights
from workloads.load import load
from workloads.workload import Vocabulary

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
LLAMA = transformers.LlamaForCausalLM
TOKENS = torch.randint(6, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(tmp_path: Path, base: Any, kind: Any, **changes: Any) -> Any:
    """A model with a trained adapter: its base is in `base`, the adapter in `adapter`."""
    base.save_pretrained(tmp_path / "base")
    loaded = kind.from_pretrained(tmp_path / "base", **changes)
    model = peft.get_peft_model(loaded, peft.LoraConfig(**_lora(kind)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    return model.eval()


def _lora(kind: Any) -> dict[str, Any]:
    language = "CausalLM" in kind.__name__
    task, targets = ("CAUSAL_LM", ["q_proj"]) if language else ("SEQ_CLS", ["query"])
    return {"task_type": task, "target_modules": targets, "r": 2}


def refused(folder: Path) -> str:
    with pytest.raises(
        WorkloadError, match=r"is an adapter of peft for .*base, and a model is read whole"
    ) as found:
        describe_folder(str(folder))
    return str(found.value)


def test_the_command_of_the_message_makes_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = adapted(tmp_path, LLAMA(transformers.LlamaConfig(**SIZES)), LLAMA)
    python, option, code = shlex.split(refused(tmp_path / "adapter").split("`")[1])
    assert (python, option) == ("python", "-c")
    exec(code)
    workload = load(f"hf:{tmp_path}/adapter-merged", "causal_lm", Vocabulary(97, 2), sequence_length=16)
    ours = with_weights(workload, lambda name: workload.initial(name, 0))
    # What a user of transformers has of the folder: the base and the adapter.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        found, wanted = ours({"tokens": TOKENS}).logits, model(TOKENS).logits
        assert torch.allclose(theirs(TOKENS).logits, wanted, atol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_the_command_knows_the_labels_of_a_head(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    model = adapted(
        tmp_path, transformers.BertModel(config), transformers.BertForSequenceClassification, num_labels=5
    )
    exec(shlex.split(refused(tmp_path / "adapter").split("`")[1])[2])
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "adapter-merged"
    ).eval()
    with torch.no_grad():
        assert torch.allclose(merged(TOKENS).logits, model(TOKENS).logits, atol=1e-5)


def test_an_adapter_beside_a_model_is_not_passed_over(tmp_path: Path) -> None:
    adapted(tmp_path, LLAMA(transformers.LlamaConfig(**SIZES)), LLAMA)
    (tmp_path / "base" / "adapter_config.json").write_text(
        (tmp_path / "adapter" / "adapter_config.json").read_text()
    )
    with pytest.raises(WorkloadError, match="is an adapter of peft"):
        check_none_unread(str(tmp_path / "base"))


def test_a_prompt_cannot_be_merged(tmp_path: Path) -> None:
    about = {"base_model_name_or_path": "x/base", "peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    assert "PROMPT_TUNING cannot be merged into weights: name hf:x/base" in refused(tmp_path)
