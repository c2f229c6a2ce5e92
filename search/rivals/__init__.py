"""Rivals for comparisons: Tofu's search and operator placement."""
