"""From a schedule to a JAX function: the program replayed with its layouts as constraints."""
