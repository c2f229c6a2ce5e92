"""Starts that use structure: repeated layers, symmetric mesh axes, coarser meshes."""
