"""Journal of a scheduler's inputs and decisions: its records without text, and its reenactment."""
