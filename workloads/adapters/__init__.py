"""Which parameters of a model are trained, and small ones that are trained beside others that are not."""
