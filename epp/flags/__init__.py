"""Define every flag of `epp`, one row per flag, and read command lines."""
