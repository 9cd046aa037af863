"""What is trained: plain single-device torch that knows no ranks and no Ray.

`workload` is the contract with the orchestrator, `load` makes a workload from what a job file says.
"""
