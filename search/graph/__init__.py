"""The network as the searches work on it: exact reductions, dynamic programming, profiles of usage."""
