"""Compiled programs as text: instructions (`module`), replica groups (`groups`), collectives (`collectives`) and what
is around them (`origin`)."""
