"""Where files are: local and remote file systems, every remote call with a deadline and retries."""
