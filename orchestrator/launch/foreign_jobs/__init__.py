"""Job files from the configurations of other trainers: axolotl, torchtitan, TRL and Hugging Face's Trainer, verl.

`read` turns a file into keys, `trainers` finds out whose they are, a module for each trainer fills in a `job`, and
`translate` writes it. A key that none takes is reported with the place or the reason that
`orchestrator.config.other_names` knows.
"""
