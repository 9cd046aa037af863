"""The presentation of a run: totals, goodput, summary, report, live display, MLflow. Nothing here decides anything."""
