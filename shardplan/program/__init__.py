"""Programs: tracing of functions, and the passes over programs before a mesh is known."""
