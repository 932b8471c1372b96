"""Estimated profiles of models and GPUs that were not measured, by a roofline model."""
