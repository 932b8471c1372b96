"""What a run is judged by, and how sure that is."""
