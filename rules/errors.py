"""The errors of the package: one base class, and the one that the rules raise.

The base class lives here because the rules stand below everything else and may not import upwards.
"""


class ShardplanError(Exception):
    """Base of every error that the package raises on purpose."""


class RuleError(ShardplanError):
    """A description of an operation is wrong, clashes with another one, or was refuted by execution."""
