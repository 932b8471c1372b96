"""Access the Kubernetes API server: lists, watches, the Lease and Events."""
