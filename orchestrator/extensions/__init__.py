"""What few runs need: each folder is found by its entry points in pyproject.toml, as a stranger's package would be.

No module outside this package imports one of it, and no folder here imports another; `tests/unit/test_house.py` holds
both. `orchestrator/config/extensions.py` says what an entry point may offer.
"""
