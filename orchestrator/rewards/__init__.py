"""Rewards of generated answers, for reinforcement learning: by fixed rules, by own functions and by unit tests.

All scoring runs in processes next to the trainer, each with a time and a memory limit.
"""
