"""The job file: pydantic models with their validation rules, overrides and messages; InputError; outcomes.

New keys of the job file belong here. This is the lowest package, and needs neither torch nor Ray.
"""
