"""From a job file to what every part of a run is given, and all checks before it begins.

Imports data, planning, storage and job, and loads the workload.
"""
