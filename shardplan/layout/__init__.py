"""Layouts, meshes, and the collectives between two layouts, with their prices."""
