"""The project's own transformers: configuration, presets, layers, and the losses of every head."""
