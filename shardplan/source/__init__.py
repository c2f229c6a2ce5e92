"""A traced program as Python text, which a person can read and which needs JAX alone."""
