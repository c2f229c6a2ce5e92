"""JAX internals of the rules: every use of what is below JAX's public interface.

``whole_call`` is a primitive of this library: a described function that stays one operation in a jaxpr. It runs and
lowers as its function. Differentiation and batching replace it by its function.
"""

from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax._src.dtypes import primal_tangent_dtype
from jax._src.interpreters import mlir as internal_mlir
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def experimental(module: str) -> Any:
    """A module of ``jax.experimental``, imported at its first use: the import of Pallas is slow."""
    return import_module(f"jax.experimental.{module}")


whole_call_p = Primitive("whole_call")
whole_call_p.multiple_results = True


def _run(*operands: Any, jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
    return list(jaxpr_as_fun(jaxpr)(*operands))


def _differentiate(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    filled = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(lambda *operands: list(jaxpr_as_fun(jaxpr)(*operands)), tuple(primals), tuple(filled))


def _batch(operands: Any, dims: Any, *, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    results = jax.vmap(lambda *given: list(jaxpr_as_fun(jaxpr)(*given)), in_axes=tuple(dims))(*operands)
    return results, [0] * len(results)


whole_call_p.def_impl(_run)
whole_call_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[whole_call_p] = _differentiate
batching.primitive_batchers[whole_call_p] = _batch
mlir.register_lowering(whole_call_p, mlir.lower_fun(_run, multiple_results=True))


_ours = {whole_call_p}


def take_as_ours(primitive: Primitive) -> None:
    """Removes a primitive of this library from those that JAX has."""
    _ours.add(primitive)


def lowered_primitives() -> list[Primitive]:
    """Every primitive with a lowering in JAX on some platform, Pallas included, by name.

    Further modules of ``jax.experimental``, and programs, may add their own.
    """
    import_module("jax.experimental.pallas")
    found = set(internal_mlir._lowerings)
    for platform in internal_mlir._platform_specific_lowerings.values():
        found |= set(platform)
    return sorted(found - _ours, key=lambda primitive: primitive.name)


def convertible_extended_dtype() -> Any:
    """An extended dtype that arrays can be converted to and from: JAX has none in public."""
    return primal_tangent_dtype(np.dtype(np.int32), np.dtype(np.float32))
