"""Image samples from a folder or WebDataset archives: decoded once, and read by number."""

from orchestrator.data.images.samples import Images

__all__ = ["Images"]
