"""What happens when, and why: `decide` is a pure function, `controller` observes, acts and records.

It computes nothing of the training itself: it gives a task to a gang and hears of it. No torch, and Ray only through
`cluster`.
"""
