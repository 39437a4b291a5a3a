"""Experiments: models, data and comparisons. Imports seng, never the reverse."""
