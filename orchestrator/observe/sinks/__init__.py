"""Copies of a run's rows and events for other tools: TensorBoard, Weights & Biases, OpenTelemetry. A separate process
that reads the run directory makes them, so that the run never loads their libraries.
"""
