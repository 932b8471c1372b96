"""Estimation of profiles for models and GPUs that were not measured, by a roofline model."""
