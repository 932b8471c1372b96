"""What /metrics shows: the table of metrics, what is counted, and what is read when it is asked for."""
