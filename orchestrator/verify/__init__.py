"""Checks of a run's promises: replay steps bit by bit, and compare a run with faults with an undisturbed run.

Commands alone use it: no run needs it.
"""
