"""A job tried from end to end on this machine before it is trusted to a cluster: everything small but its shape.

`layouts` lowers the degrees and keeps the axes, `model` and `text` make the model and the data small, `job` puts them
together, `stages` are what is tried, one after the other.
"""
