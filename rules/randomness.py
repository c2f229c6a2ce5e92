"""Random numbers: their values must not depend on their layout.

Threefry computes every number from the key and the number's own position, so that any split gives the same numbers.
Other generators draw one sequence for the whole array, for all keys together. Their results do not split.
"""

from shardplan.rules.equation import Equation, Semantics, Tensor, expression, letters, sizes_of
from shardplan.rules.expression import Affine, Apply, Expression, Opaque, Position, Read, Result, Term


def _counts_positions(key: Tensor) -> bool:
    """Whether the generator of these keys computes each number from its position alone."""
    return str(key.dtype) == "key<fry>"


def _draw(name: str) -> Semantics:
    """``shape`` numbers or keys for every key."""

    def rule(equation: Equation) -> Expression:
        key, out = equation.inputs[0], equation.outputs[0]
        rank = len(key.shape)
        at = letters("i", len(out.shape))
        drawn = at[rank:]
        body: Term
        if _counts_positions(key):
            body = Apply(name, (Read(0, at[:rank]), *(Position(p) for p in drawn)))
        else:
            body = Opaque(name, (Read(0, (None,) * rank),), at)
        return expression(equation, sizes_of((at, out.shape)), [Result(at, body)], ("key",))

    return rule


def _per_key(name: str) -> Semantics:
    """A function of each key and of its scalars or arrays, the same for all keys."""

    def rule(equation: Equation) -> Expression:
        out = equation.outputs[0]
        at = letters("i", len(out.shape))
        operands = ("key", "data")[: len(equation.inputs)]
        body: Term
        if _counts_positions(equation.inputs[0]) or name in ("seed", "clone"):
            body = Apply(name, tuple(Read(n, at[: len(t.shape)]) for n, t in enumerate(equation.inputs)))
        else:
            body = Opaque(name, tuple(Read(n, (None,) * len(t.shape)) for n, t in enumerate(equation.inputs)), at)
        return expression(equation, sizes_of((at, out.shape)), [Result(at, body)], operands)

    return rule


def _gamma(equation: Equation) -> Expression:
    """A number for each parameter, all drawn in one loop over them in a row, with keys split in their order.

    Parts of the row are contiguous only for a split of the outermost dimension.
    """
    out = equation.outputs[0]
    at = letters("i", len(out.shape))
    outer = next((n for n, size in enumerate(out.shape) if size > 1), 0)
    outer = outer if _counts_positions(equation.inputs[0]) else len(at)
    reads = tuple(
        Read(n, tuple(index if dim == outer else None for dim, index in enumerate(at[: len(tensor.shape)])))
        for n, tensor in enumerate(equation.inputs)
    )
    body = Opaque("gamma", reads, tuple(index for dim, index in enumerate(at) if dim != outer))
    return expression(equation, sizes_of((at, out.shape)), [Result(at, body)], ("key", "data"))


def _words(name: str, into_key: bool) -> Semantics:
    """Keys from their words of 32 bits (in trailing dimensions), or the words of keys."""

    def rule(equation: Equation) -> Expression:
        source, out = equation.inputs[0].shape, equation.outputs[0].shape
        rank = min(len(source), len(out))
        at = letters("i", len(out))
        whole: tuple[Affine | None, ...] = (*at[:rank], *([None] * (len(source) - rank)))
        body = Opaque(name, (Read(0, whole),), () if into_key else at[rank:])
        return expression(equation, sizes_of((at, out)), [Result(at, body)])

    return rule


def _rng_bit_generator(equation: Equation) -> Expression:
    """A new state and one sequence of bits for the whole array."""
    state, bits = (letters(name, len(t.shape)) for name, t in zip(("s", "i"), equation.outputs, strict=True))
    read = Read(0, (None,) * len(equation.inputs[0].shape))
    results = [Result(state, Opaque("next", (read,), state)), Result(bits, Opaque("bits", (read,), bits))]
    sizes = sizes_of((state, equation.outputs[0].shape), (bits, equation.outputs[1].shape))
    return expression(equation, sizes, results, ("state",))


def _rng_uniform(equation: Equation) -> Expression:
    out = equation.outputs[0].shape
    at = letters("i", len(out))
    body = Opaque("uniform", (Read(0), Read(1)), at)
    return expression(equation, sizes_of((at, out)), [Result(at, body)], ("low", "high"))


RULES: dict[str, Semantics] = {
    "random_bits": _draw("bits"),
    "random_split": _draw("split"),
    "random_seed": _per_key("seed"),
    "random_clone": _per_key("clone"),
    "random_fold_in": _per_key("fold_in"),
    "random_gamma": _gamma,
    "rng_bit_generator": _rng_bit_generator,
    "rng_uniform": _rng_uniform,
    "to_edtype": _words("wrap", into_key=True),
    "from_edtype": _words("unwrap", into_key=False),
    "random_wrap": _words("wrap", into_key=True),
    "random_unwrap": _words("unwrap", into_key=False),
}
