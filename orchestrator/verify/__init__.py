"""Checks of the promises: steps of a run replayed bit by bit, a run with faults compared with an undisturbed one.

Commands alone use it: no run needs it.
"""
