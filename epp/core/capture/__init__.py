"""What a scheduler was told and decided: noted while it runs, and done again later."""
