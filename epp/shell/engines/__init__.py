"""Touches the model servers: reads their metrics pages."""
