"""The choice of one endpoint for one request: filters, scorers, a picker, and the scheduler's
inputs.
"""
