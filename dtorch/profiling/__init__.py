"""``dtorch.profile``: what ran when, as tables, traces and pictures."""
