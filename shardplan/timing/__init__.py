"""The model of step time: the overlap of collectives with work, and a simulator of devices."""
