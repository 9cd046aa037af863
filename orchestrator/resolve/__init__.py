"""From a job file to what every part of a run is given, and all checks before it begins.

The workload is loaded here, and commits of other runs that a run begins with are found and judged.
"""
