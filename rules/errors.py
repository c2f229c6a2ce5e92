"""The errors of the package: one base class, and the error of the rules.

The base class is here because the rules are below all other packages and may not import them.
"""


class ShardplanError(Exception):
    """Base of every error that the package raises on purpose."""


class RuleError(ShardplanError):
    """A description of an operation is wrong, clashes with another one, or was refuted by execution."""
