"""What pickers of one pool tell each other: decisions and load. Beliefs, of which any may be lost."""
