"""CLIP: an image encoder and a text encoder, trained to match pairs within the global batch (Radford et al., 2021).

Sizes and tensors have the names of transformers' CLIPModel. `logit_scale` has one element instead of none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.extensions.vision.folder import load_weights, options_of
from orchestrator.extensions.vision.layers import (
    Width,
    check_patches,
    check_pixels,
    check_width,
    linear,
    stack,
)
from workloads.workload import Batch

LEGACY_END = 2
"""With this id of the end token, transformers uses the largest id of a text instead."""
SIDE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
TEXT = {**SIDE, "vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407}
VISION = {
    **SIDE,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 32,
    "num_channels": 3,
}
WITHOUT: dict[str, Any] = {"attention_dropout": 0.0}
"""Known fields that support only this value."""


class Clip(nn.Module):
    """CLIP with both encoders. The defaults are ViT-B/32.

    Args:
        text: changed fields of transformers' CLIPTextConfig; `vision` those of its CLIPVisionConfig.
        projection_dim: the size of both embeddings.
        logit_scale_init_value: the initial logarithm of the similarities' factor.
        folder: a CLIPModel folder with weights; it replaces all other options.

    Raises ValueError for inconsistent sizes.
    """

    def __init__(
        self,
        text: Mapping[str, Any] | None = None,
        vision: Mapping[str, Any] | None = None,
        projection_dim: int = 512,
        logit_scale_init_value: float = 2.6592,
        folder: str | None = None,
    ) -> None:
        super().__init__()
        if folder is not None:
            if text or vision:
                raise ValueError("folder says all sizes; leave out text and vision")
            clip_options = options_of(folder, "clip")
            text, vision = clip_options.get("text_config", {}), clip_options.get("vision_config", {})
            projection_dim = clip_options.get("projection_dim", projection_dim)
        if projection_dim < 1:
            raise ValueError(f"projection_dim is {projection_dim}; give at least 1")
        self.text_config = _filled("text", TEXT, text or {}, lenient=folder is not None)
        self.vision_config = _filled("vision", VISION, vision or {}, lenient=folder is not None)
        self.projection_dim, self.start = projection_dim, logit_scale_init_value
        self.text_model = TextEncoder(self.text_config)
        self.vision_model = ImageEncoder(self.vision_config)
        hidden = (self.vision_config["hidden_size"], self.text_config["hidden_size"])
        self.visual_projection = linear(hidden[0], projection_dim, hidden[0] ** -0.5, bias=False)
        self.text_projection = linear(hidden[1], projection_dim, hidden[1] ** -0.5, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor([logit_scale_init_value]))
        if folder is not None:
            load_weights(self, folder)

    def check(self, batch: Batch, limits: Mapping[str, int]) -> None:
        """Raise ValueError if samples do not fit these encoders, see `workloads.own.protocols.Model`."""
        check_pixels(batch, self.vision_config)
        if "caption" not in batch:
            raise ValueError(
                "samples have no caption; set data.samples.options.tokens, to at most "
                f"{self.text_config['max_position_embeddings']}"
            )
        caption = batch["caption"]
        text = self.text_config
        end = self.text_model.end
        if caption.shape[1] > text["max_position_embeddings"]:
            raise ValueError(
                f"captions have {caption.shape[1]} tokens, but text.max_position_embeddings is "
                f"{text['max_position_embeddings']}; change one of them"
            )
        size = max(limits.get("caption", 0), int(caption.max()) + 1)
        if size > text["vocab_size"]:
            raise ValueError(
                f"token ids go up to {size - 1}, but text.vocab_size is {text['vocab_size']}; make it {size}"
            )
        ends = caption.max(1).values if end == LEGACY_END else torch.full_like(caption[:, 0], end)
        if (caption[:, -1] != ends).any():
            raise ValueError(
                f"captions end with token {int(caption[0, -1])}, but text.eos_token_id is {end}, and the vector of a "
                f"text is read at that token; use a tokenizer that ends texts with it, or change text.eos_token_id"
            )

    def image_embeddings(self, pixels: Tensor) -> Tensor:
        """Map images [B, channels, size, size] to unit vectors [B, projection_dim]."""
        result = self.visual_projection(self.vision_model(pixels)).float()
        return functional.normalize(result, dim=-1)

    def text_embeddings(self, caption: Tensor) -> Tensor:
        """Map token ids [B, L] to unit vectors [B, projection_dim]."""
        return functional.normalize(self.text_projection(self.text_model(caption)).float(), dim=-1)

    def embed(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the features that `compare` needs: both embeddings and the factor of the similarities.

        If the batch has `classes`, token ids [B, C, L] of a caption for each class, the same for every sample, also
        return zero_shot: whether the nearest caption is that of `label`.
        """
        images = self.image_embeddings(batch["pixels"])
        texts = self.text_embeddings(batch["caption"])
        scale = self.logit_scale.float().exp().expand(len(images), 1)
        values = {}
        if "classes" in batch:
            nearest = (images @ self.text_embeddings(batch["classes"][0]).T).argmax(-1)
            right = (nearest == batch["label"]).float()
            values["zero_shot"] = right.masked_fill(batch["label"] < 0, torch.nan)  # samples without a class
        return torch.cat([images, texts, scale], -1), values

    @staticmethod
    def compare(features: Tensor, counted: Tensor) -> Tensor:
        """Return the loss of each pair, [G], among all counted pairs.

        It is the mean of two cross-entropies: of the text given the image and of the image given the text. features:
        [G, 2 projection_dim + 1], see `embed`.
        """
        images, texts = features[:, :-1].chunk(2, -1)
        scale, other = features[:, -1:], ~counted[None]
        # [G, G]: rows are images, columns texts, and the pairs are on the diagonal. Rows that only fill up the batch
        # are no candidates for others.
        similarity, own_index = images @ texts.T, torch.arange(len(features), device=features.device)
        sides = [(each * scale).masked_fill(other, -torch.inf) for each in (similarity, similarity.T)]
        of_image, of_text = (functional.cross_entropy(each, own_index, reduction="none") for each in sides)
        return (of_image + of_text) / 2

    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks of the image encoder, then those of the text encoder."""
        return [*self.vision_model.encoder.layers, *self.text_model.encoder.layers]

    def to_hf(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the configuration and the tensors of transformers' CLIPModel."""
        config = {
            "model_type": "clip",
            "architectures": ["CLIPModel"],
            "projection_dim": self.projection_dim,
            "logit_scale_init_value": self.start,
            "text_config": {
                "bos_token_id": None,
                "pad_token_id": None,
                "projection_dim": self.projection_dim,
                **self.text_config,
            },
            "vision_config": {"projection_dim": self.projection_dim, **self.vision_config},
        }
        return config, {**tensors, "logit_scale": tensors["logit_scale"].reshape(())}

    def difference_to(self, theirs: Any) -> float:
        """Return the largest difference of similarities to a CLIPModel with the same weights, on random pairs.

        It is a share of the largest similarity, if that is above 1.
        """
        draw, side = torch.Generator().manual_seed(0), self.vision_config
        length, end = self.text_config["max_position_embeddings"], self.text_config["eos_token_id"]
        size = side["image_size"]
        pixels = torch.randn(3, side["num_channels"], size, size, generator=draw)
        caption = torch.randint(0, self.text_config["vocab_size"], (3, length), generator=draw)
        caption[:, -1] = self.text_config["vocab_size"] - 1 if end == LEGACY_END else end
        with torch.no_grad():
            images, texts = self.image_embeddings(pixels), self.text_embeddings(caption)
            ours = images @ texts.T * self.logit_scale.exp()
            result = theirs(input_ids=caption, pixel_values=pixels).logits_per_image
        return float((ours - result).abs().max() / result.abs().max().clamp(min=1.0))

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our tensors from transformers', the inverse of `to_hf`. Tensors of older versions of transformers are
        ignored.
        """
        result = {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}
        return {**result, "logit_scale": result["logit_scale"].reshape(1)}


class _Stack(nn.Module):
    def __init__(self, width: Width, causal: bool) -> None:
        super().__init__()
        self.layers = stack(width, causal)


class TextEncoder(nn.Module):
    """A causal transformer. The output at the first end token is the vector of a text."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.end, hidden = config["eos_token_id"], config["hidden_size"]
        self.embeddings = nn.Module()
        self.embeddings.token_embedding = _table(config["vocab_size"], hidden)
        self.embeddings.position_embedding = _table(config["max_position_embeddings"], hidden)
        self.encoder = _Stack(_width("text", config), causal=True)
        self.final_layer_norm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [B, L] to [B, hidden]."""
        at: Any = self.embeddings
        x = at.token_embedding(ids) + at.position_embedding.weight[: ids.shape[1]]
        for block in self.encoder.layers:
            x = block(x)
        x = self.final_layer_norm(x)
        end = ids.argmax(-1) if self.end == LEGACY_END else (ids == self.end).int().argmax(-1)
        return x[torch.arange(len(x), device=x.device), end]


class ImageEncoder(nn.Module):
    """A vision transformer. The output at the class token is the vector of an image."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, size = config["hidden_size"], config["patch_size"]
        patches = check_patches(config["image_size"], size)
        self.embeddings = nn.Module()
        self.embeddings.class_embedding = nn.Parameter(torch.randn(hidden) * hidden**-0.5)
        patch = nn.Conv2d(config["num_channels"], hidden, size, stride=size, bias=False)
        nn.init.normal_(patch.weight, std=0.02)
        self.embeddings.patch_embedding = patch
        self.embeddings.position_embedding = _table(patches + 1, hidden)
        self.pre_layrnorm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])  # transformers' spelling
        self.encoder = _Stack(_width("vision", config), causal=False)
        self.post_layernorm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images [B, channels, size, size] to [B, hidden]."""
        at: Any = self.embeddings
        patches = at.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = at.class_embedding.to(patches.dtype).expand(len(patches), 1, -1)
        x = torch.cat([first, patches], 1) + at.position_embedding.weight
        x = self.pre_layrnorm(x)
        for block in self.encoder.layers:
            x = block(x)
        return self.post_layernorm(x[:, 0])


def _table(rows: int, hidden: int) -> nn.Embedding:
    result = nn.Embedding(rows, hidden)
    nn.init.normal_(result.weight, std=0.02)
    return result


def _width(name: str, config: Mapping[str, Any]) -> Width:
    hidden, layers, heads = (
        config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    check_width(name, hidden, heads, config["intermediate_size"], config["hidden_act"])
    reads = hidden**-0.5 * (2 * layers) ** -0.5
    std = (reads, hidden**-0.5, (2 * hidden) ** -0.5)
    return Width(
        hidden,
        layers,
        heads=heads,
        intermediate=config["intermediate_size"],
        activation=config["hidden_act"],
        eps=config["layer_norm_eps"],
        std=std,
    )


def _filled(
    side: str, known: Mapping[str, Any], fields: Mapping[str, Any], lenient: bool = False
) -> dict[str, Any]:
    """Return all fields of one encoder. Raises ValueError for an unknown field or an unsupported value."""
    for name, only in WITHOUT.items():
        if fields.get(name, only) != only:
            raise ValueError(f"{side}.{name} is {fields[name]}, but only {only} is supported")
    if not lenient and (unknown := sorted(set(fields) - set(known))):
        raise ValueError(f"{side} has no field {unknown[0]}; it has {', '.join(known)}")
    return {name: fields.get(name, value) for name, value in known.items()}
