"""A small run for tests of runs that begin with its weights, and folders of transformers with small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs import job
from local_run import drive_here

STEPS = 6
"""Of the base, and of the runs that begin with it."""


def document(text: str, **workload: Any) -> dict[str, Any]:
    """A job of `STEPS` steps with a commit every 3, and these keys of its workload."""
    found = job(text, steps=STEPS, optimizer={"lr": 3e-3, "schedule": "constant"})
    found["workload"] |= workload
    found["checkpoint"] = {"every": 3, "keep": 3, "export": None}
    found["parallel"] = {"micro_batch": 2}
    return found


def run_base(text: str, folder: Path, **workload: Any) -> Path:
    """Run the job of that text in `folder`; returns its run directory. Prepared data is beside the text."""
    run = folder / "base"
    drive_here(document(text, **workload) | {"name": "base"}, str(run), Path(text).parent / "cache")
    return run


def save_dense(folder: Path, rows: int, **sizes: int) -> str:
    """Write a small GPT-2 with a vocabulary of `rows` tokens; returns the folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    kept = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dense = GPT2Config(**(kept | sizes), vocab_size=rows, initializer_range=0.1)
    GPT2LMHeadModel(dense).save_pretrained(folder)
    return str(folder)


def save_experts(folder: Path, rows: int) -> str:
    """Write a small Mixtral of 4 experts with a vocabulary of `rows` tokens; returns the folder."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    # Weights larger than usual set the scores of experts apart, as in the other tests of layouts.
    experts = MixtralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        num_local_experts=4, max_position_embeddings=64, sliding_window=None, vocab_size=rows,
        initializer_range=0.1,
    )  # fmt: skip
    MixtralForCausalLM(experts).save_pretrained(folder)
    return str(folder)


def save_class(folder: Path, rows: int) -> str:
    """Write a small Ministral, a class that is run as it is, with a vocabulary of `rows` tokens; returns the folder."""
    import torch
    from transformers import MinistralConfig, MinistralForCausalLM

    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MinistralConfig(
        **sizes, intermediate_size=64, vocab_size=rows, max_position_embeddings=64, sliding_window=8, head_dim=8,
        initializer_range=0.1, pad_token_id=1,
    )  # fmt: skip
    MinistralForCausalLM(config).save_pretrained(folder)
    return str(folder)
