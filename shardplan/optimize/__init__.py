"""From a problem to its best schedule within a memory limit."""
