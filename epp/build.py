"""Configuration to scheduler: the one wiring that production and simulation share."""
