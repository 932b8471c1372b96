"""Profiles of models and GPUs that nobody has measured, by a roofline model."""
