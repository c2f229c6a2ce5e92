"""Primal heuristics and branch and bound."""
