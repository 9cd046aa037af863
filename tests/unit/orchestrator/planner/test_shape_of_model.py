"""What planning is told of models that are not divided."""

from __future__ import annotations

from pathlib import Path

import transformers

from orchestrator.parallel.layout import Layout, split_problems
from orchestrator.planner.shape_of_model import model_shape
from workloads.hf.as_they_are.hf_class import describe_hf_class


def test_a_class_that_is_run_as_it_is_says_why_it_is_not_divided(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OlmoeConfig(**sizes, num_experts=4, intermediate_size=16)
    config.architectures = ["OlmoeForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = model_shape(describe_hf_class(str(tmp_path)), 32)
    assert split_problems(Layout(tp=2), shape) == []
    of_layers, of_sequence = (split_problems(layout, shape)[0] for layout in (Layout(pp=2), Layout(cp=2)))
    assert "the loss of its routers needs all layers at once; set pp to 1" in of_layers
    assert of_sequence.endswith("class is run as it is; set cp to 1")
    bloom = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    bloom.architectures = ["BloomForCausalLM"]
    bloom.save_pretrained(tmp_path / "bloom")
    (of_tensors,) = split_problems(Layout(tp=2), model_shape(describe_hf_class(str(tmp_path / "bloom")), 32))
    assert "transformers ships no plan for it; set tp to 1" in of_tensors
