"""Hugging Face: conversion of checkpoints and configurations in both directions, transformers classes that are run
unchanged, and checks that both compute the same.
"""
