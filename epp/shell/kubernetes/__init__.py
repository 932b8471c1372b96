"""Access the Kubernetes API server: lists and watches of objects, the Lease and Events."""
