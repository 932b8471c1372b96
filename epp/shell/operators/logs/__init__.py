"""Format of log lines, and lines about decisions, endpoints and plugins."""
