"""Usage limits by prices: Lagrange multipliers of usage, and mixtures of assignments that fit."""
