"""Rewrites of the applied program, one behaviour of XLA a file."""
