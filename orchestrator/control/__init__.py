"""What happens when, and why: `decide` is a pure function, `controller` observes, acts and records.

Imports train only for the task that it gives to a gang; else what is below: export, track, resolve, checkpoint,
planning, storage and job. No torch, and Ray only through `cluster`.
"""
