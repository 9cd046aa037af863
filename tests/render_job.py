"""A small job, and the options with which `cluster render` takes it, by target."""

from __future__ import annotations

from typing import Any

OWN = ["--image", "registry.example/image:1"]
TARGETS = {
    "kuberay": ["--runs", "s3://bucket/runs", *OWN],
    "aws": OWN,
    "gcp": ["--project", "p", *OWN],
    "azure": OWN,
    "local": ["--head-ip", "10.0.0.1", "--worker-ip", "10.0.0.2", *OWN],
    "skypilot": ["--runs", "s3://bucket/runs"],
}
JOB: dict[str, Any] = {
    "name": "Big.Run",
    "workload": {"model": "gpt-tiny"},
    "data": {
        "sources": [{"uri": "s3://bucket/*.txt"}],
        "tokenizer": {"train_bpe": 300},
        "sequence_length": 16,
    },
    "train": {"steps": 1, "global_batch": 1},
    "resources": {"workers": {"min": 1, "max": 3}, "per_worker": {"cpu": 2}},
}
