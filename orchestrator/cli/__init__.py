"""The commands: arguments in, exit codes and text or JSON out. Nothing is decided here.

May import every package; no package imports it.
"""
