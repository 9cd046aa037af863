"""Rewards of generated answers, for reinforcement learning: by fixed rules, by own functions and by unit tests.

Everything that scores runs in processes beside the trainer, each with a time and a memory limit.
"""
