"""Files, local and remote: storage backends, deadlines and retries, atomic writes, run directories, rows, locks,
leases.

Code that reads or writes bytes belongs here; code that knows what the bytes mean does not. File names that several
packages share are in `file_names`.
"""
