"""Copies of a run's rows and events for other tools: TensorBoard, Weights & Biases, OpenTelemetry. They are made by a
process of their own that reads the run directory, so that no library of theirs is near the run.
"""
