"""Parameters and numbers of a traced program as Python text.

>>> import jax, numpy as np
>>> literal((1, np.int64(2), None, np.dtype("bfloat16"))), literal(jax.lax.Precision.HIGHEST), literal(float("-inf"))
('(1, 2, None, jnp.bfloat16)', 'lax.Precision.HIGHEST', '-np.inf')
>>> spec_text(jax.P(None, ("data", "model")))
'None, ("data", "model")'
"""

from __future__ import annotations

import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout
from jax.sharding import PartitionSpec

from shardplan import _jax
from shardplan.errors import ArgumentError

_OF_NUMPY = frozenset(
    {"bool", "complex64", "complex128"} | {f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)}
)
_FLOATS = frozenset({"float16", "float32", "float64"})
_ENUMS = ("Precision", "GatherScatterMode", "DotAlgorithmPreset", "RoundingMethod", "FftType", "AccuracyMode")
_NAMED_TUPLES = (
    *("GatherDimensionNumbers", "ScatterDimensionNumbers", "ConvDimensionNumbers", "RaggedDotDimensionNumbers"),
    "DotAlgorithm",
)


def dtype_text(dtype: Any) -> str:
    """An element type."""
    name = np.dtype(dtype).name
    if name in _OF_NUMPY or name in _FLOATS:
        return "np.bool_" if name == "bool" else f"np.{name}"
    if hasattr(jnp, name):
        return f"jnp.{name}"
    raise ArgumentError(f"the element type `{name}` has no name in jax.numpy")


def literal(value: Any) -> str:
    """A parameter of an operation. Raises ArgumentError for an object without a public form."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return repr(bool(value)) if value is not None else "None"
    if isinstance(value, enum.Enum) and type(value).__name__ in _ENUMS:
        return f"lax.{type(value).__name__}.{value.name}"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if isinstance(value, (float, np.floating)):
        return _float_text(float(value))
    if isinstance(value, PartitionSpec):
        return f"P({spec_text(value)})"
    if type(value).__name__ in _NAMED_TUPLES:
        return _fields_text(value)
    if isinstance(value, Layout):
        return f"Layout({literal(tuple(value.major_to_minor))})"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, _jax.Primitive) and (name := _jax.public_name(value)):
        return name
    if isinstance(value, (np.dtype, type)):
        return dtype_text(value)
    raise ArgumentError(f"a parameter of the program has no public form: `{value!r:.200}`")


def _fields_text(value: Any) -> str:
    names = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None) or value.__slots__
    inside = ", ".join(f"{name}={literal(getattr(value, name))}" for name in names)
    return f"lax.{type(value).__name__}({inside})"


def _float_text(value: float) -> str:
    if math.isnan(value):
        return "np.nan"
    return repr(value) if math.isfinite(value) else "np.inf" if value > 0 else "-np.inf"


def quoted(text: str) -> str:
    """A text in double quotes where that needs no escapes."""
    return repr(text) if '"' in text or "\\" in text or not text.isprintable() else f'"{text}"'


def spec_text(spec: PartitionSpec) -> str:
    """The entries of a spec, without the last ones that are None."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return ", ".join("P.UNCONSTRAINED" if one is PartitionSpec.UNCONSTRAINED else literal(one) for one in entries)


def number_text(value: Any, dtype: Any, typed: bool) -> str:
    """A number of rank 0. ``typed``: whether its type does not follow from what it meets."""
    kind = jax.dtypes.canonicalize_dtype(dtype) if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else None
    if kind is None:
        raise ArgumentError("a literal of the program is a random key, which has no public form")
    number = np.asarray(value).item()
    if isinstance(number, complex):
        return f"{dtype_text(kind)}({number!r})"
    text = literal(number)
    return f"{dtype_text(kind)}({text})" if typed else text


def array_text(array: Any) -> str:
    """An array as nested lists."""
    values = np.asarray(array)
    wide = values.astype(np.float64) if values.dtype.name not in _OF_NUMPY | _FLOATS else values
    listed = np.array2string(wide, separator=", ", threshold=values.size + 1, max_line_width=100, floatmode="unique")
    listed = listed.replace("nan", "np.nan").replace("inf", "np.inf")
    if listed.endswith(".]"):
        listed = listed[:-1] + "0]"
    return f"np.array({listed}, dtype={dtype_text(values.dtype)}).reshape({literal(values.shape)})"
