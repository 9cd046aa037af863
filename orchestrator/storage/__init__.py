"""Files, local and remote: storage backends, deadlines and retries, atomic writes, run directories, rows, locks,
leases.

What reads or writes bytes belongs here; what the bytes mean does not. The file names that several packages share are
in `file_names`.
"""
