"""Touches the world; decides nothing."""
