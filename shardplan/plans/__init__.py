"""Plans: the planning pipeline, files and cache, reports, and planned functions."""
