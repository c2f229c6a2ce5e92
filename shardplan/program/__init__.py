"""From a function to a program: tracing and the passes over it. No mesh is known here."""
