"""Modules that were written for plain torch, on a mesh: ``dtorch.distribute`` and its plans."""
