"""What may be chosen and what it costs: strategies, what XLA cannot split, the cost network, schedules."""
