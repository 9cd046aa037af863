"""Checks of the promises: steps of a run replayed bit by bit, a run with faults compared with an undisturbed one.

Imports what is below; nothing but cli imports it.
"""
