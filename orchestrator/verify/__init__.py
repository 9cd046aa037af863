"""Checks of a run's promises: replay steps bit by bit, and compare a run with faults with an undisturbed run.

Only commands use this package; runs do not need it.
"""
