"""Find replicas of the picker and transport opaque frames between them."""
