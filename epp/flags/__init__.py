"""Every flag of `epp`, a row each, and how command lines are read."""
