"""The user's own code, named `module:name` in a job file: how it is found, hashed and called.

`protocols` defines what each kind of code must provide, `object_reference` finds and hashes it, `model` trains a plain
module.
"""
