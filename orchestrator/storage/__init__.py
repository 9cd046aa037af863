"""Run directories and every file in them, on any file system: backends with deadlines and retries, rows, locks, leases.

What reads or writes bytes belongs here, what the bytes mean does not. Imports job.
"""
