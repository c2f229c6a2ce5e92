"""Fused attention of the cuDNN kernels: batches and heads are free, positions and features are hidden.

Query heads come in as many groups as there are key heads: ``out[b, t, k*G + g, h]`` needs ``q[b, :, k*G + g, :]`` and
``key[b, :, k, :]``. A split of sequences exists on paper (query positions are independent), but the kernels take whole
sequences. With dropout the kernels draw their own noise on every device, with and without a plan.
"""

from dataclasses import dataclass
from math import prod

from shardplan.rules.equation import Equation, Semantics, expression
from shardplan.rules.expression import ZERO, Affine, Expression, Opaque, Read, Reduce, Result, Shape, Term, index

_HEADS_FIRST = 1
"""Value of the ``layout`` parameter for (batch, head, position, feature); otherwise positions come before heads."""

_FORWARD = ("q", "k", "v", "bias", "q_length", "kv_length", "q_offset", "kv_offset", "k_pages", "v_pages")
_BACKWARD = (*_FORWARD, "statistics", "out", "d_out")
_SCALES = ("descale", "scale")


@dataclass(frozen=True, slots=True)
class _Heads:
    """Sizes of one attention, and the dimensions of its batches and heads."""

    heads_first: bool
    batch: int
    key_heads: int
    group: int
    flops_of_a_product: int

    @staticmethod
    def of(equation: Equation) -> "_Heads":
        heads_first = equation.params["layout"] == _HEADS_FIRST
        query, key = equation.inputs[0].shape, equation.inputs[1].shape
        head_dim, time_dim = (1, 2) if heads_first else (2, 1)
        group = query[head_dim] // key[head_dim]
        return _Heads(heads_first, query[0], key[head_dim], group, 2 * prod(query) * key[time_dim])

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {"b": self.batch, "k": self.key_heads}
        return sizes | {"g": self.group} if self.group > 1 else sizes

    @property
    def query_head(self) -> Affine:
        return index("k") * self.group + index("g") if self.group > 1 else index("k")

    def read(self, operand: int, name: str, shape: Shape, paged: bool) -> Read:
        """The slice of an operand for head ``k*G + g`` of batch ``b``. Absent operands have no elements."""
        b, head = index("b"), self.query_head if name in ("q", "out", "d_out") else index("k")
        if prod(shape) == 0 or name.startswith(_SCALES):
            return Read(operand, (None,) * len(shape))
        if name == "bias":
            return Read(operand, (b if shape[0] > 1 else ZERO, self.query_head if shape[1] > 1 else ZERO, None, None))
        if name == "statistics":
            return Read(operand, (self._rows(shape, None), self.query_head, None))
        if len(shape) != 4 or name.endswith("pages"):
            return Read(operand, (b, *(None,) * (len(shape) - 1)))
        batch = None if paged and name in ("k", "v") else b
        return Read(operand, (batch, head, None, None) if self.heads_first else (batch, None, head, None))

    def _rows(self, shape: Shape, segment: Affine | None) -> Affine | None:
        """Statistics hold one row per batch, or per batch and segment of a packed sequence."""
        segments = shape[0] // self.batch
        if segments == 1:
            return index("b")
        return None if segment is None else index("b") * segments + segment

    def head_result(
        self, number: int, function: str, shape: Shape, reads: tuple[Read, ...], flops: int
    ) -> tuple[Result, dict[str, int]]:
        """A result in the dimensions of queries (``out``, ``dq``) or of keys and values (``dk``, ``dv``)."""
        t, h = index(f"t{number}"), index(f"h{number}")
        of_key = function in ("dk", "dv")
        head = index("k") if of_key else self.query_head
        at = (index("b"), head, t, h) if self.heads_first else (index("b"), t, head, h)
        body: Term = Opaque(function, reads, (t, h), flops=flops)
        if of_key and self.group > 1:
            body = Reduce("group", ("g",), body)
        return Result(at, body), {f"t{number}": shape[2 if self.heads_first else 1], f"h{number}": shape[3]}

    def statistics_result(self, shape: Shape, reads: tuple[Read, ...]) -> tuple[Result, dict[str, int]]:
        """The softmax's statistics: (batch and segment, head, position)."""
        t, s = index("t_stat"), index("s")
        rows, segments = self._rows(shape, s), shape[0] // self.batch
        assert rows is not None
        hidden, sizes = ((t,), {}) if segments == 1 else ((s, t), {"s": segments})
        body = Opaque("statistics", reads, hidden, flops=1)
        return Result((rows, self.query_head, t), body), sizes | {"t_stat": shape[2]}

    def extreme(self, name: str, reads: tuple[Read, ...]) -> Result:
        """The largest magnitude over everything, as the 8 bit kernels report it."""
        return Result((ZERO,) * 4, Reduce("max", tuple(self.sizes), Opaque(f"largest_{name}", reads, flops=1)))

    def bias_gradient(self, shape: Shape, reads: tuple[Read, ...]) -> tuple[Result, dict[str, int]]:
        t, s = index("t_bias"), index("s_bias")
        at = (index("b") if shape[0] > 1 else ZERO, self.query_head if shape[1] > 1 else ZERO, t, s)
        sums = tuple(name for name, dim in (("b", 0), ("k", 1), ("g", 1)) if shape[dim] == 1 and name in self.sizes)
        body: Term = Opaque("dbias", reads, (t, s), flops=1)
        return Result(at, Reduce("sum", sums, body) if sums else body), {"t_bias": shape[2], "s_bias": shape[3]}


def _attention(names: tuple[str, ...], outputs: tuple[str, ...]) -> Semantics:
    """A family of attention kernels. ``outputs``: the possible results, in order. The last ones may be missing."""

    def rule(equation: Equation) -> Expression:
        heads = _Heads.of(equation)
        known = names + tuple(f"scale{n}" for n in range(len(names), len(equation.inputs)))
        shapes = [tensor.shape for tensor in equation.inputs]
        paged = any(name.endswith("pages") and prod(shape) for name, shape in zip(known, shapes, strict=True))
        reads = tuple(heads.read(n, name, shapes[n], paged) for n, name in enumerate(known))
        sizes, results = heads.sizes, []
        for number, (name, tensor) in enumerate(zip(outputs, equation.outputs, strict=False)):
            more: dict[str, int] = {}
            if name.startswith("largest"):
                result = heads.extreme(name.removeprefix("largest_"), reads)
            elif name == "statistics":
                result, more = heads.statistics_result(tensor.shape, reads)
            elif name == "dbias":
                result, more = heads.bias_gradient(tensor.shape, reads)
            else:  # two products forwards; five backwards, of which dq counts one
                flops = heads.flops_of_a_product * {"out": 2, "dq": 1}.get(name, 2)
                result, more = heads.head_result(number, name, tensor.shape, reads, flops)
            sizes |= more
            results.append(result)
        return expression(equation, sizes, results, known)

    return rule


_GRADIENTS = ("dq", "dk", "dv")
_FORWARD_RULE = _attention(_FORWARD, ("out", "statistics"))
_BACKWARD_RULE = _attention(_BACKWARD, (*_GRADIENTS, "dbias"))
_FP8_FORWARD_RULE = _attention(("q", "k", "v"), ("out", "largest_s", "largest_o", "statistics"))
_FP8_BACKWARD_RULE = _attention(
    ("q", "k", "v", "out", "d_out", "statistics"),
    (*_GRADIENTS, "largest_dq", "largest_dk", "largest_dv", "largest_dp"),
)

RULES: dict[str, Semantics] = {
    f"dot_product_attention_{kind}{suffix}": rule
    for suffix in ("", "_wrapper")
    for kind, rule in (
        ("fwd", _FORWARD_RULE),
        ("bwd", _BACKWARD_RULE),
        ("fp8_fwd", _FP8_FORWARD_RULE),
        ("fp8_bwd", _FP8_BACKWARD_RULE),
    )
}
