"""The planning problem: strategies, the limits of XLA's partitioner, the cost network, and schedules."""
