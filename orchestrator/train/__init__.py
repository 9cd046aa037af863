"""Training: the rank program, from taking a device to the last commit.

`loop` is the rank program, `engines` compute a step, `parallel` cuts the plain model over ranks. It knows nothing
of control, which has started it.
"""
