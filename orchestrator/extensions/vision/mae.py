"""Masked autoencoders: reconstruct an image's hidden patches from the few visible ones (He et al., 2022).

Sizes have the names of transformers' ViTMAEConfig. `to_hf` renames tensors to those of ViTMAEForPreTraining.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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

SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "decoder_hidden_size": 512,
    "decoder_num_hidden_layers": 8,
    "decoder_num_attention_heads": 16,
    "decoder_intermediate_size": 2048,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
    "mask_ratio": 0.75,
    "norm_pix_loss": False,
}
WITHOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Known fields that support only this value."""
NAMES = (
    ("self_attn.out_proj", "attention.o_proj"),
    ("self_attn.", "attention."),
    ("layer_norm1", "layernorm_before"),
    ("layer_norm2", "layernorm_after"),
)
"""Pairs of our names and transformers' names, in the order in which they apply."""
SAVED = (
    ("decoder.decoder_encoder.layer.", "decoder.decoder_layers."),
    ("vit.encoder.layer.", "vit.layers."),
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)
"""Pairs of names that transformers writes to files and names in its class, in the order in which they apply."""
STD = 0.02


class Mae(nn.Module):
    """A masked autoencoder. The defaults are ViT-MAE base.

    Args:
        sizes: changed fields of transformers' ViTMAEConfig.
        folder: a ViTMAEForPreTraining folder with weights; it replaces the sizes.

    Raises ValueError for inconsistent sizes.
    """

    def __init__(self, folder: str | None = None, **sizes: Any) -> None:
        super().__init__()
        if folder is not None and sizes:
            raise ValueError(f"folder says all sizes; leave out {min(sizes)}")
        fields = sizes if folder is None else options_of(folder, "vit_mae")
        for name, only in WITHOUT.items():
            if fields.get(name, only) != only:
                raise ValueError(f"{name} is {fields[name]}, but only {only} is supported")
        if folder is None and (unknown := sorted(set(fields) - set(SIZES))):
            raise ValueError(f"there is no size {unknown[0]}; there are {', '.join(SIZES)}")
        self.config = config = {name: fields.get(name, value) for name, value in SIZES.items()}
        patches = check_patches(config["image_size"], config["patch_size"])
        self.kept = int(patches * (1 - config["mask_ratio"]))
        if not 0 < self.kept < patches:
            raise ValueError(f"mask_ratio {config['mask_ratio']} keeps {self.kept} of {patches} patches")
        self.vit = _Encoder(config, patches)
        self.decoder = _Decoder(config, patches)
        if folder is not None:
            load_weights(self, folder)

    def check(self, batch: Batch, limits: Mapping[str, int]) -> None:
        """Raise ValueError if samples do not fit this encoder, see `workloads.own.protocols.Model`."""
        check_pixels(batch, self.config)
        patches = (self.config["image_size"] // self.config["patch_size"]) ** 2
        if "noise" not in batch or batch["noise"].shape[1] != patches:
            raise ValueError(f"an image has {patches} patches; set data.samples.options.patches to that")

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean squared error over an image's hidden patches, [B].

        The batch has `pixels` [B, channels, size, size] and `noise` [B, patches]. The patches with the smallest noise
        are visible.
        """
        # order: the patches by noise. restore: the index of each patch in that order. Both are [B, patches].
        order = batch["noise"].argsort(dim=1, stable=True)
        restore, visible = order.argsort(1), order[:, : self.kept]
        hidden = (restore >= self.kept).float()
        drawn = self.decoder(self.vit(batch["pixels"], visible), restore).float()
        target = self.patches(batch["pixels"])
        if self.config["norm_pix_loss"]:
            spread = target.var(-1, keepdim=True)
            target = (target - target.mean(-1, keepdim=True)) / (spread + 1e-6) ** 0.5
        error = (drawn - target).square().mean(-1)
        return (error * hidden).sum(1) / hidden.sum(1)

    def patches(self, pixels: Tensor) -> Tensor:
        """Cut images into patches [B, patches, size * size * channels]."""
        size = self.config["patch_size"]
        cut = pixels.unfold(2, size, size).unfold(3, size, size)  # [B, channels, rows, columns, size, size]
        return cut.permute((0, 2, 3, 4, 5, 1)).flatten(3).flatten(1, 2)

    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks of the encoder, then those of the decoder."""
        return [*self.vit.layers, *self.decoder.decoder_layers]

    def to_hf(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the configuration and the tensors of transformers' ViTMAEForPreTraining."""
        config = {"model_type": "vit_mae", "architectures": ["ViTMAEForPreTraining"], **self.config}
        return config, {_renamed(name, NAMES): tensor for name, tensor in tensors.items()}

    def difference_to(self, theirs: Any) -> float:
        """Return the difference of the loss to that of a ViTMAEForPreTraining with the same weights, on random images.

        It is a share of the loss, if that is above 1.
        """
        draw, size = torch.Generator().manual_seed(0), self.config["image_size"]
        pixels = torch.randn(3, self.config["num_channels"], size, size, generator=draw)
        noise = torch.rand(3, (size // self.config["patch_size"]) ** 2, generator=draw)
        with torch.no_grad():
            ours = self.loss({"pixels": pixels, "noise": noise}).mean()
            result = theirs(pixel_values=pixels, noise=noise).loss
        return float((ours - result).abs() / result.abs().clamp(min=1.0))

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our tensors from transformers', the inverse of `to_hf`."""
        back = tuple((theirs, ours) for ours, theirs in NAMES)
        return {_renamed(_renamed(name, SAVED), back): tensor for name, tensor in tensors.items()}


class _Encoder(nn.Module):
    def __init__(self, config: Mapping[str, Any], patches: int) -> None:
        super().__init__()
        hidden, size = config["hidden_size"], config["patch_size"]
        self.embeddings = nn.Module()
        self.embeddings.cls_token = nn.Parameter(torch.randn(1, 1, hidden) * STD)
        self.embeddings.register_buffer("position_embeddings", positions(patches, hidden))
        self.embeddings.patch_embeddings = nn.Module()
        projection = nn.Conv2d(config["num_channels"], hidden, size, stride=size)
        nn.init.xavier_uniform_(projection.weight.view(hidden, -1))
        assert projection.bias is not None
        nn.init.zeros_(projection.bias)
        self.embeddings.patch_embeddings.projection = projection
        self.layers = stack(_width(config, ""))
        self.layernorm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])

    def forward(self, pixels: Tensor, visible: Tensor) -> Tensor:
        """Encode the class token and the patches `visible` [B, kept]: [B, 1 + kept, hidden]."""
        at: Any = self.embeddings
        x = at.patch_embeddings.projection(pixels).flatten(2).transpose(1, 2) + at.position_embeddings[:, 1:]
        x = x.gather(1, visible[..., None].expand(-1, -1, x.shape[-1]))
        first = (at.cls_token + at.position_embeddings[:, :1]).to(x.dtype).expand(len(x), -1, -1)
        x = torch.cat([first, x], 1)
        for block in self.layers:
            x = block(x)
        return self.layernorm(x)


class _Decoder(nn.Module):
    def __init__(self, config: Mapping[str, Any], patches: int) -> None:
        super().__init__()
        hidden = config["decoder_hidden_size"]
        self.decoder_embed = linear(config["hidden_size"], hidden, STD)
        self.mask_token = nn.Parameter(torch.randn(1, 1, hidden) * STD)
        self.decoder_pos_embed: Tensor
        self.register_buffer("decoder_pos_embed", positions(patches, hidden))
        self.decoder_layers = stack(_width(config, "decoder_"))
        self.decoder_norm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])
        self.decoder_pred = linear(hidden, config["patch_size"] ** 2 * config["num_channels"], STD)

    def forward(self, x: Tensor, restore: Tensor) -> Tensor:
        """Predict all patches, [B, patches, pixels], from the class token and the visible patches.

        restore [B, patches] gives the index of each patch in the sequence of visible, then hidden patches.
        """
        x = self.decoder_embed(x)
        masks = self.mask_token.to(x.dtype).expand(len(x), restore.shape[1] + 1 - x.shape[1], -1)
        patches = torch.cat([x[:, 1:], masks], 1)
        patches = patches.gather(1, restore[..., None].expand(-1, -1, x.shape[-1]))
        x = torch.cat([x[:, :1], patches], 1) + self.decoder_pos_embed
        for block in self.decoder_layers:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]


def positions(patches: int, hidden: int) -> Tensor:
    """Return sines and cosines of each patch's column and row, zero for the class token: [1, 1 + patches, hidden].

    Vaswani et al., 2017, in two dimensions. Raises ValueError if hidden is not a multiple of 4.
    """
    if hidden % 4:
        raise ValueError(f"positions of two dimensions need features that 4 divides, not {hidden}")
    side, quarter = round(patches**0.5), hidden // 4
    rate = 1.0 / 10000.0 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    line = torch.arange(side, dtype=torch.float64)[:, None] * rate
    of_axis = torch.cat([line.sin(), line.cos()], 1)
    column, row = of_axis.repeat(side, 1), of_axis.repeat_interleave(side, 0)
    result = torch.cat([column, row], 1)
    return torch.cat([result.new_zeros(1, hidden), result])[None].float()


def _width(config: Mapping[str, Any], side: str) -> Width:
    hidden, layers, heads, intermediate = (
        config[f"{side}{key}"]
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    )
    check_width(f"{side}hidden_size", hidden, heads, intermediate, config["hidden_act"])
    activation, eps, bias = (config[key] for key in ("hidden_act", "layer_norm_eps", "qkv_bias"))
    return Width(
        hidden,
        layers,
        heads=heads,
        intermediate=intermediate,
        activation=activation,
        eps=eps,
        std=(STD, STD, STD),
        bias=bias,
    )


def _renamed(name: str, names: Sequence[tuple[str, str]]) -> str:
    for old, new in names:
        name = name.replace(old, new)
    return name
