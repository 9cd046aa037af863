"""The job file: pydantic models with their validation rules, overrides, messages; the one error for wrong input;
outcomes.

New keys of the job file belong here. Imports no other package of the orchestrator, no torch and no Ray.
"""
