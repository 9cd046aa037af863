"""From a job file to everything that the parts of a run need, with all checks before it begins.

The workload is loaded here, and commits of other runs that a run starts from are found and checked.
"""
