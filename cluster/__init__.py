"""Where a run is executed. Knows nothing of jobs, models or checkpoints; imports neither of the other packages.

Each package within imports only those below it; `tests/unit/test_house.py` has their order and holds it.
"""
