"""Find the other replicas of the picker, and transport opaque frames between replicas."""
