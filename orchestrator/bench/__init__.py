"""Compare exports: quality, bytes, memory and speed, each in the runtime that it was written for."""
