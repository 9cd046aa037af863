"""How a run is started: here, as a detached actor on a cluster, by submission, inside Ray Train, from manifests.

Preflight is here too.
"""
