"""Where a run is executed. Knows nothing of jobs, models or checkpoints; imports neither of the other packages.

From the bottom up: workers, local, jobs, render.
"""
