"""How a model is trained, from job file to exported model. Only `__main__` stands beside the packages.

From the bottom up: job, storage, planning, checkpoint, data, resolve, train, track, export, control, launch,
tune, verify, cli. A package imports only those below it; `tests/unit/test_house.py` holds that.
"""
