"""Ray on this machine: an embedded session, clusters of several nodes with an autoscaler, and injected faults."""
