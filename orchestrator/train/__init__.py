"""Training: the rank program, from taking a device to the last commit.

`loop` is the rank program, `engines` compute a step, `parallel` cuts the plain model over ranks. Imports resolve, data,
checkpoint, planning, storage and job; never control, which it does not know.
"""
