"""What a scheduler received and decided: recorded without text, and decided again."""
