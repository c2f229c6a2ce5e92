"""Fingerprints: a digest of a program that is the same in every process and on every machine.

It has the shapes, the types, the operations with their parameters and the names of arguments. It has no values of
literals and closed-over arrays: a plan holds for all of them. It has no source lines, addresses or orders of sets.

>>> import numpy as np
>>> stable_text({"axes": (0, 1), "dtype": np.dtype("float32"), "sharding": None})
"{'axes': (0, 1), 'dtype': float32, 'sharding': None}"
>>> stable_text(len)
'builtins.len'
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from shardplan import _jax

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def stable_text(parameter: Any) -> str:
    """A parameter of an operation as text that is equal in two runs of the same program."""
    if parameter is None or isinstance(parameter, (bool, int, float, complex, str, bytes)):
        return repr(parameter)
    if isinstance(parameter, enum.Enum):
        return f"{type(parameter).__name__}.{parameter.name}"
    if isinstance(parameter, (tuple, list)):
        return f"({', '.join(map(stable_text, parameter))})"
    if isinstance(parameter, (set, frozenset)):
        return f"{{{', '.join(sorted(map(stable_text, parameter)))}}}"
    if isinstance(parameter, dict):
        return f"{{{', '.join(f'{stable_text(k)}: {stable_text(v)}' for k, v in parameter.items())}}}"
    if isinstance(parameter, (_jax.Jaxpr, _jax.ClosedJaxpr)):
        return _jaxpr_text(parameter.jaxpr if isinstance(parameter, _jax.ClosedJaxpr) else parameter)
    return _object_text(parameter)


def _object_text(parameter: Any) -> str:
    if isinstance(parameter, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(parameter).tobytes()).hexdigest()
        return f"{parameter.dtype}{parameter.shape}{digest}"
    if isinstance(parameter, np.dtype) or (isinstance(parameter, type) and issubclass(parameter, np.generic)):
        return np.dtype(parameter).name
    if isinstance(parameter, NamedSharding):  # without where the devices are, and of which kind
        return f"{dict(parameter.mesh.shape)} {parameter.spec}"
    if is_dataclass(parameter) and not isinstance(parameter, type):
        inside = (f"{field.name}={stable_text(getattr(parameter, field.name))}" for field in fields(parameter))
        return f"{type(parameter).__name__}({', '.join(inside)})"
    if callable(parameter):
        module = getattr(parameter, "__module__", "")
        return f"{module}.{getattr(parameter, '__qualname__', type(parameter).__name__)}"
    return _ADDRESS.sub("", repr(parameter))


def _jaxpr_text(jaxpr: Any) -> str:
    """The equations of a body, variables numbered in the order in which they appear."""
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> str:
        if isinstance(atom, _jax.Literal):
            return f"literal:{atom.aval.str_short()}"
        return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval.str_short()}"

    def names(atoms: Any) -> str:
        return ",".join(map(name, atoms))

    lines = [names((*jaxpr.constvars, *jaxpr.invars))]
    for equation in jaxpr.eqns:
        operation = f"{equation.primitive.name}{stable_text(equation.params)}"
        lines.append(f"{operation} {names(equation.invars)}>{names(equation.outvars)}")
    lines.append(names(jaxpr.outvars))
    return f"[{'; '.join(lines)}]"
