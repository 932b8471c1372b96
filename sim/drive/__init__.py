"""A load generator that sends the requests of a trace to a live gateway, at the trace's times."""
