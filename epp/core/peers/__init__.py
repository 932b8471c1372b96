"""The exchange of decisions and load between pickers of one pool. All of it are estimates, and may
be lost.
"""
