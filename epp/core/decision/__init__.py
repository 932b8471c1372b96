"""The choice of one endpoint for one request: filters, scorers, a picker plugin, and the scheduler
with its input events.
"""
