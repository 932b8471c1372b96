"""Replicas of the picker: finding them, and moving frames between them that nobody here reads."""
