"""The choice of a layout: which ones are legal, what memory and time they need, what machines offer and cost.

Pure functions of a job, a model's shape and a machine, without torch and Ray.
"""
