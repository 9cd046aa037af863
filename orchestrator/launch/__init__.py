"""Check a job before it runs (preflight), and start it: on this machine, on a cluster, by submission, in Ray Train."""
