"""What every test may rely on: token authentication before Ray is imported, and no hub."""

import os

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
os.environ["HF_HUB_OFFLINE"] = "1"
