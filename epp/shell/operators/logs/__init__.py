"""What the log says, and how."""
