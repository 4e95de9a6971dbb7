"""Weights on disk: read, saved, and put into modules, by the workers and slice by slice."""
