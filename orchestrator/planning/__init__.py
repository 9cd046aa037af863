"""Which layout a job runs under: legality, sizes, memory, time and price, and the choice among them.

Pure functions of a job, a model's shape and a machine. Imports job and storage; no torch and no Ray.
"""
