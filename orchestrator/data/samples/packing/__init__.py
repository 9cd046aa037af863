"""Best-fit packing: put whole documents together into samples, so that only documents longer than a sample are cut.

`best_fit` assigns documents to samples and keeps the result in memory-mapped files.
"""
