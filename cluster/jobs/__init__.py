"""Several jobs on one cluster: submission through Ray Jobs, the queue, and admission."""
