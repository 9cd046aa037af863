"""CLIP and the masked autoencoder against transformers: loss, gradients, and the way in and out of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from orchestrator.extensions.vision.clip import Clip
from orchestrator.extensions.vision.mae import Mae, positions
from workloads.own.check import model_of
from workloads.own.model import OwnWorkload, describe_own
from workloads.own.samples import OfSamples
from workloads.workload import Vocabulary

SIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SIDE, "vocab_size": 258, "max_position_embeddings": 12, "eos_token_id": 257}
VISION = {**SIDE, "image_size": 8, "patch_size": 2, "num_channels": 1}
MAE = {
    **{key: VISION[key] for key in ("image_size", "patch_size", "num_channels")},
    **SIDE,
    **{f"decoder_{key}": value for key, value in SIDE.items()},
}


def theirs_of(ours: Any, folder: Path) -> Any:
    """The model of transformers that reads what ours has exported."""
    from transformers import CLIPModel, ViTMAEForPreTraining

    config, tensors = ours.to_hf(ours.state_dict())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    kind: Any = CLIPModel if isinstance(ours, Clip) else ViTMAEForPreTraining
    found, about = kind.from_pretrained(folder, output_loading_info=True)
    assert not {*about["missing_keys"], *about["unexpected_keys"]}
    return found


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def clip(seed: int = 0) -> Clip:
    torch.manual_seed(seed)
    return Clip(text=TEXT, vision=VISION, projection_dim=8)


def pairs(count: int) -> dict[str, Tensor]:
    caption = torch.randint(0, 256, (count, 12))
    caption[:, 9:] = 257
    caption[0, 5:] = 257
    return {"pixels": torch.randn(count, 1, 8, 8), "caption": caption}


@pytest.mark.parametrize("end", [257, 2])
def test_clip_is_that_of_transformers(tmp_path: Path, end: int) -> None:
    torch.manual_seed(0)
    ours = Clip(text={**TEXT, "eos_token_id": end}, vision=VISION, projection_dim=8)
    theirs, batch = theirs_of(ours, tmp_path / "hf"), pairs(6)
    expected = theirs(input_ids=batch["caption"], pixel_values=batch["pixels"], return_loss=True)
    features, values = ours.embed(batch)
    losses = ours.compare(features, torch.ones(6, dtype=torch.bool))
    assert not values
    assert losses.mean().item() == pytest.approx(expected.loss.item(), abs=1e-5)
    found = ours.to_hf(gradients(ours, losses.mean()))[1]
    wanted = gradients(theirs, expected.loss)
    assert found.keys() == wanted.keys()
    for name in wanted:  # of which some are 23, where a processor's order of sums is 1e-5
        off, size = (float(each.abs().max()) for each in (found[name] - wanted[name], wanted[name]))
        assert off < 2e-6 * max(size, 1.0), name
    logits = (features[:, :8] @ features[:, 8:16].T * features[:, 16:]).detach()
    assert float((logits - expected.logits_per_image).abs().max()) < 1e-5


@pytest.mark.parametrize("normed", [False, True])
def test_the_masked_autoencoder_is_that_of_transformers(tmp_path: Path, normed: bool) -> None:
    torch.manual_seed(0)
    ours = Mae(**MAE, norm_pix_loss=normed)
    theirs = theirs_of(ours, tmp_path / "hf")
    batch = {"pixels": torch.randn(3, 1, 8, 8), "noise": torch.rand(3, 16)}
    expected = theirs(pixel_values=batch["pixels"], noise=batch["noise"]).loss
    losses = ours.loss(batch)
    assert losses.shape == (3,)
    assert losses.mean().item() == pytest.approx(expected.item(), abs=1e-5)
    found, wanted = ours.to_hf(gradients(ours, losses.mean()))[1], gradients(theirs, expected)
    # transformers computes gradients of the fixed positions too, once they were read from a folder
    assert wanted.keys() - found.keys() <= {"decoder.decoder_pos_embed", "vit.embeddings.position_embeddings"}
    wanted = {name: wanted[name] for name in found}
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


def test_positions_are_those_of_transformers() -> None:
    from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

    rows, columns = build_2d_sinusoidal_position_embedding(4, 4, 16, cls_token=True).chunk(2, -1)
    assert torch.allclose(positions(16, 16)[0], torch.cat([columns, rows], -1).float())


def test_a_folder_of_transformers_is_read(tmp_path: Path) -> None:
    first: Any
    torch.manual_seed(0)
    for first in (clip(), Mae(**MAE)):
        theirs = theirs_of(first, tmp_path / "first")
        theirs.save_pretrained(tmp_path / "saved")
        read = type(first)(folder=str(tmp_path / "saved"))
        assert all(torch.equal(value, first.state_dict()[name]) for name, value in read.state_dict().items())
        with torch.device("meta"):
            assert read.state_dict().keys() == type(first)(folder=str(tmp_path / "saved")).state_dict().keys()


def test_a_folder_that_transformers_has_begun_is_read(tmp_path: Path) -> None:
    """Not one that was read from ours, whose names it keeps."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    theirs = ViTMAEForPreTraining(ViTMAEConfig(**MAE))
    theirs.save_pretrained(tmp_path)
    ours = Mae(folder=str(tmp_path))
    assert ours.difference_to(theirs.eval()) < 1e-6


def test_weights_begin_as_those_of_transformers() -> None:
    from transformers import CLIPConfig, CLIPModel

    wide = {**SIDE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    text, vision = {**TEXT, **wide}, {**VISION, **wide}
    ours = Clip(text=text, vision=vision, projection_dim=48)
    theirs = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=48))
    _, named = ours.to_hf(ours.state_dict())
    for name, weight in theirs.state_dict().items():
        if weight.dim() > 1 and weight.numel() > 1000:
            assert float(named[name].std()) == pytest.approx(float(weight.std()), rel=0.2), name


def test_what_does_not_count_is_no_counterpart() -> None:
    model, batch = clip(), pairs(5)
    features, _ = model.embed(batch)
    there = torch.tensor([True, True, False, True, False])
    among = model.compare(features, there)[there]
    alone = model.compare(features[there], torch.ones(3, dtype=torch.bool))
    assert torch.allclose(among, alone, atol=1e-6)


def test_zero_shot_is_the_class_whose_caption_is_nearest() -> None:
    model, batch = clip(), pairs(4)
    classes = pairs(3)["caption"]
    nearest = (model.image_embeddings(batch["pixels"]) @ model.text_embeddings(classes).T).argmax(-1)
    label = nearest.clone()
    label[0] = (label[0] + 1) % 3
    _, values = model.embed({**batch, "classes": classes.expand(4, -1, -1), "label": label})
    assert values["zero_shot"].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_what_is_of_no_class_does_not_count_as_wrong() -> None:
    batch = pairs(3) | {"label": torch.tensor([0, -1, 0]), "classes": pairs(1)["caption"].expand(3, 1, -1)}
    batch["counted"] = torch.ones(3, dtype=torch.bool)
    config = describe_own("orchestrator.extensions.vision.clip:Clip", {"text": TEXT, "vision": VISION}, None)
    workload = OwnWorkload("clip", config, OfSamples(), Vocabulary(1, 0))
    found = workload.loss(model_of(workload, 0), batch)
    assert [float(value) for value in found.sums["zero_shot"]] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({"pixels": torch.zeros(2, 3, 8, 8)}, {}, r"those of samples are \(3, 8, 8\)"),
        ({"caption": None}, {}, "samples have no caption"),
        ({"caption": torch.full((2, 13), 257)}, {}, "captions have 13 tokens"),
        ({"caption": torch.full((2, 12), 258)}, {}, "token ids go up to 258"),
        ({}, {"caption": 300}, "token ids go up to 299, but text.vocab_size is 258"),
        ({"caption": torch.full((2, 12), 7)}, {}, "captions end with token 7"),
    ],
)
def test_samples_that_are_not_for_clip(changes: dict[str, Any], limits: dict[str, int], message: str) -> None:
    batch = {name: value for name, value in {**pairs(2), **changes}.items() if value is not None}
    clip().check(pairs(2), {"caption": 258})
    with pytest.raises(ValueError, match=message):
        clip().check(batch, limits)


@pytest.mark.parametrize("noise", [None, 8])
def test_samples_that_are_not_for_the_masked_autoencoder(noise: int | None) -> None:
    batch = {"pixels": torch.zeros(2, 1, 8, 8)} | ({"noise": torch.rand(2, noise)} if noise else {})
    with pytest.raises(ValueError, match="an image has 16 patches"):
        Mae(**MAE).check(batch, {})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Clip(projection_dim=0), "projection_dim is 0"),
        (lambda: Clip(vision={**VISION, "patch_size": 0}), "patches of 0 pixels"),
        (lambda: Clip(text={**TEXT, "intermediate_size": 0}), "give at least 1 of each"),
        (lambda: Clip(vision={**VISION, "patch_size": 3}), "patches of 3 pixels do not fill an image of 8"),
        (lambda: Clip(text={"layers": 2}), "text has no field layers"),
        (lambda: Clip(text={**TEXT, "num_attention_heads": 3}), "3 heads do not divide 16"),
        (lambda: Clip(vision={"attention_dropout": 0.1}), r"only 0\.0 is supported"),
        (lambda: Mae(mask_ratio=1.0), "keeps 0 of 196 patches"),
        (lambda: Mae(layers=1), "there is no size layers"),
        (lambda: Mae(hidden_act="relu"), "activation relu is not among"),
        (lambda: Clip(folder="nowhere"), "cannot be read"),
    ],
)
def test_what_cannot_be_made_is_said(made: Any, message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        made()
