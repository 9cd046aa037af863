"""The seconds of a step that has not been run: operators on a device, collectives over a topology, pipeline schedules
played event by event.

Pure functions of a model's shape, a layout and a machine. Standard library only.
"""
