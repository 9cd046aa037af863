"""The job file: pydantic models with their validation rules, overrides, messages; the one error for wrong input;
outcomes.

New keys of the job file belong here. It is the lowest room, and needs neither torch nor Ray.
"""
