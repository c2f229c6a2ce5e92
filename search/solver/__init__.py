"""The solver of one graph: rounds of bounds, dynamic programming, diving and CP-SAT."""
