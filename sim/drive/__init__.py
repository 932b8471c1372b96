"""A load generator: sends the requests of a trace to a live gateway, at the trace's times."""
