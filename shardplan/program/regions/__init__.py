"""Regions: parts of a program that the user splits by hand, each a ``shard_map``."""
