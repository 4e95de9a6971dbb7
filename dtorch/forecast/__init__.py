"""What a plan would do, before anything runs: ``dtorch.explain``."""
