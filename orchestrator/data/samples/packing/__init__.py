"""Best-fit packing: whole documents put together into samples, so that only those longer than a sample are cut.

`best_fit` assigns pieces to samples, `index` keeps in memory-mapped files which pieces a sample has, `windows` is what
reads them.
"""
