"""The parity table of `workloads.hf.check.parity_table`, extended by the image models, compared with transformers.

`python -m orchestrator.extensions.vision.parity_table [FILE]` prints the table, or writes it to FILE.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from orchestrator.extensions.vision.clip import Clip
from orchestrator.extensions.vision.mae import Mae
from workloads.hf.check import parity_table

COMMAND = "python -m orchestrator.extensions.vision.parity_table"
SIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SIDE, "vocab_size": 258, "max_position_embeddings": 12, "eos_token_id": 257}
VISION = {**SIDE, "image_size": 8, "patch_size": 2, "num_channels": 1}
MAE: dict[str, Any] = {**VISION, **{f"decoder_{key}": value for key, value in SIDE.items()}}


@dataclass(frozen=True)
class Case:
    """An image model to compare. `compare` returns the largest differences of its outputs and of its loss."""

    title: str
    kind: str
    make: Callable[[], nn.Module]
    compare: Callable[[Any, Any], tuple[float, float]]


def difference(case: Case) -> tuple[float, float]:
    """Export random weights of the case, load them in transformers, and compare outputs and loss in fp32."""
    import transformers

    torch.manual_seed(0)
    ours: Any = case.make()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    config, tensors = ours.to_hf(ours.state_dict())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
        with torch.no_grad():
            return case.compare(ours, getattr(transformers, case.kind).from_pretrained(folder).eval())


def _of_clip(ours: Clip, theirs: Any) -> tuple[float, float]:
    caption = torch.randint(0, 256, (6, 12))
    caption[:, 9:] = 257
    batch = {"pixels": torch.randn(6, 1, 8, 8), "caption": caption}
    result = theirs(input_ids=caption, pixel_values=batch["pixels"], return_loss=True)
    features, _ = ours.embed(batch)
    loss = ours.compare(features, torch.ones(6, dtype=torch.bool)).mean()
    similar = (
        ours.image_embeddings(batch["pixels"]) @ ours.text_embeddings(caption).T * ours.logit_scale.exp()
    )
    return _largest(similar - result.logits_per_image), _largest(loss - result.loss)


def _of_mae(ours: Mae, theirs: Any) -> tuple[float, float]:
    batch = {"pixels": torch.randn(3, 1, 8, 8), "noise": torch.rand(3, 16)}
    result = theirs(pixel_values=batch["pixels"], noise=batch["noise"])
    order = batch["noise"].argsort(dim=1)
    drawn = ours.decoder(ours.vit(batch["pixels"], order[:, : ours.kept]), order.argsort(1))
    return _largest(drawn - result.logits), _largest(ours.loss(batch).mean() - result.loss)


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


CASES = (
    Case("CLIP", "CLIPModel", lambda: Clip(text=TEXT, vision=VISION, projection_dim=8), _of_clip),
    Case("masked autoencoder", "ViTMAEForPreTraining", lambda: Mae(**MAE), _of_mae),
    Case(
        "masked autoencoder, normed pixels",
        "ViTMAEForPreTraining",
        lambda: Mae(**MAE, norm_pix_loss=True),
        _of_mae,
    ),
)


def table() -> Iterator[str]:
    """Yield the table in Markdown, one row for each case."""
    yield from parity_table.table(COMMAND)
    for case in CASES:
        outputs, loss = difference(case)
        yield f"| {case.title} | `{case.kind}` | {outputs:.1e} | {loss:.1e} |"
    yield "\nOf CLIP the logits are the similarities of images and captions, of the masked autoencoder what it draws."


def main() -> None:
    """Print the table, or write it to the file named on the command line."""
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text("\n".join(table()) + "\n")
    else:
        for line in table():
            print(line)


if __name__ == "__main__":
    main()
