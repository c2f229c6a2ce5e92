"""Compiled programs: compilation for GPUs without a GPU, and their collectives and memory."""
