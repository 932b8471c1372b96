"""The journal of a scheduler's inputs and decisions: the format of its records, which have no text
of clients, and their re-enactment.
"""
