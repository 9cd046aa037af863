"""A job's needs as files that a cloud or a Kubernetes cluster understands. Plain data: no Ray, no torch."""
