"""What is kept of decisions, in memory and in files, with the endpoints' states and the configuration of the time."""
