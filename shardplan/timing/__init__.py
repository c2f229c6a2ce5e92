"""How long a step takes: the overlap of collectives with work, and a simulator of devices."""
