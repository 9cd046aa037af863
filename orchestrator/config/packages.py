"""The packages of this project, for the package below that starts processes and knows none of the others."""

from __future__ import annotations

PACKAGES = ("cluster", "workloads", "orchestrator")
"""Their names, which a user's folder may have, too."""
