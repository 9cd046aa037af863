"""Data: raw text (`sources`, `clean`, `encoding`) to token shards as tasks of Ray (`preprocessing`), what is prepared
(`prepared`), and token shards to batches by index arithmetic (`samples`, `packing`, `mixture`; `sections` while text is
still being prepared). `images` are samples of their own.

It knows no models: of workloads it needs what an objective has to do with its samples.
"""
