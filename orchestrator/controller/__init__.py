"""Drive one run: `decide` is a pure function that makes the decisions, `controller` observes, acts and records.

The gang does all training; the controller gives it a task and polls it. The package imports neither torch nor Ray; it
uses Ray through `cluster`.
"""
