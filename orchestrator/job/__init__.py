"""What a job file can say: pydantic models with their rules, overrides and messages, and the one error for wrong input.

New keys of the job file belong here. Imports no other package of the orchestrator, no torch and no Ray.
"""
