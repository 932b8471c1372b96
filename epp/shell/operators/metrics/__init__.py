"""The metrics page: the table of metrics, counting, and values that are read on request."""
