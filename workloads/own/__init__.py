"""The user's own code, named `module:name` in a job file: how it is found, identified and called.

`protocols` says what each kind of it must have, `reference` finds and hashes it, `model` trains a plain module.
"""
