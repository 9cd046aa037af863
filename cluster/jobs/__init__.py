"""Several jobs on one cluster: submission through Ray Jobs, the queue, and who is admitted when."""
