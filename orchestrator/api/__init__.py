"""The project in Python: `from orchestrator import Job, plan, run, submit, load_run, load_checkpoint`.

A job built here is the job of a file, and a run is an object. Only this package is meant to be imported by others.
"""
