"""One rank's life: take a device, build, restore, train step by step, commit, end.

`loop` is the rank program, `engines` compute a step, `parallel` cuts the plain model over ranks. Imports resolve, data,
checkpoint, planning, storage and job; never control, which it does not know.
"""
