"""Compiled programs: for GPUs that need not be there, and read back."""
