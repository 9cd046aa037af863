"""Quantisation: training with fake-quantised weights, and its checks."""
