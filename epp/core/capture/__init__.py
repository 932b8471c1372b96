"""The capture of a scheduler's inputs and decisions, and their re-enactment."""
