"""The trained models: plain single-device torch, independent of ranks and of Ray.

`workload` is the contract with the orchestrator; `load` makes a workload from the job file's settings.
"""
