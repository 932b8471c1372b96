"""Read, watch and write files: configuration, endpoints, keys and segments of records."""
