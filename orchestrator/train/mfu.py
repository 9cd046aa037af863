"""Model FLOPs utilisation of a step (MFU; Chowdhery et al., 2022, "PaLM", appendix B)."""

from __future__ import annotations


def model_flops_per_second(flops_per_token: float, tokens_per_second: float, share: float = 1.0) -> float:
    """Return the model's FLOPs per second, over all ranks.

    Recomputed activations do not count.

    Args:
        flops_per_token: of a forward and a backward pass over a row of full length.
        tokens_per_second: tokens of the global batch per second.
        share: length of the rows as a share of the full length.
    """
    return flops_per_token * tokens_per_second * share


def mfu(flops_per_second: float, peak_flops: float, ranks: int) -> float:
    """Return the share of the peak of `ranks` devices with `peak_flops` FLOPs per second each.

    Args:
        flops_per_second: of the model, over all ranks.
        peak_flops: FLOP/s of a device in matrix products.
        ranks: number of devices.
    """
    return flops_per_second / (peak_flops * ranks)
