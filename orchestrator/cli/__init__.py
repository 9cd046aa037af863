"""The commands. Each module imports what is heavy only when its command runs."""
