"""Whether promises hold: a resumed run replayed bit by bit, a disturbed run compared with a quiet one.

Imports what is below; nothing but cli imports it.
"""
