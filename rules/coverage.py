"""The coverage document: every primitive that JAX can lower, with its expression, and its splits or why it has none."""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from shardplan.rules._jax import Primitive, lowered_primitives
from shardplan.rules.analysis import Split
from shardplan.rules.operations import all_equations
from shardplan.rules.rule import Rule, derive
from shardplan.rules.table import TABLE
from shardplan.rules.without_rule import WITHOUT_RULE

_BLOCKS = 2
_TRIED_DTYPES = (np.float32, np.int32, np.bool_, np.uint32, np.complex64)
_TRIED_COUNTS = (1, 2, 3, 4, 6, 8)


_HOW_TO_READ = """\
Each row shows one example. `out[i, j] = Sum(k) lhs[i, k] * rhs[k, j]` means: element (i, j) of the result is the sum
over all k of the products. Further notation:

| written | means |
|---|---|
| `x[2*i + d - 1]?` | positions outside of `x` contribute nothing |
| `x[(i - 1) / 2]?` | nor do positions at which the division leaves a rest |
| `x[b, :]` | the whole dimension is needed |
| `(ids[b] == v) * table[v, d]` | 1 where the condition holds and else 0, times the element: a lookup |
| `x[j] if (j <= i)` | the reduction skips the element where the condition does not hold |
| `Opaque.sort(x[b, :])[i]` | a function known by name only; the index into its result does not split |
| `All(r) x[2*g + r]` | all these elements together |
| `Last(b) ...`, `overwrite(x, new)` | the last element that there is; the new element where there is one |

Everything below is built in. Operations of your own are described in one of three ways:

```text
shardplan.describe(primitive, "b i, i j -> b j")                 # like einsum; `:` for a dimension needed as a whole
shardplan.describe(primitive, "out[i] = x[i - 1]? + x[i]")       # the language above
shardplan.describe(primitive, lambda x, w: lambda i: Sum(lambda k: x[i, k] * w[k]))  # Sum is in shardplan.rules
normalised = shardplan.describe(normalise, "b : -> b :")         # a function, which from now on is one operation
```

With `check=True` a description is run in all splits that it allows, and refused if one differs. Functions with
`custom_partitioning` have their own rule. The rule of a Pallas kernel follows from its grid and block index maps. A
primitive of another library that JAX lowers as a function (those of Equinox, Lineax and Diffrax) has the rule of that
function."""


@dataclass(frozen=True, slots=True)
class Row:
    """One primitive. ``splits``: the split indices of its example, each with its halos and reducer. ``reason``: why
    none."""

    name: str
    family: str
    expression: str | None
    splits: tuple[str, ...]
    reason: str | None


def coverage() -> list[Row]:
    """A row for every primitive that JAX can lower, by name."""
    reasons = {name: reason for reason, names in WITHOUT_RULE.items() for name in names}
    return [_row(primitive, reasons.get(primitive.name)) for primitive in lowered_primitives()]


def coverage_records() -> list[dict[str, Any]]:
    """The rows as plain dictionaries, for JSON."""
    return [asdict(row) for row in coverage()]


def _row(primitive: Primitive, reason: str | None) -> Row:
    name = primitive.name
    if reason is not None:
        return Row(name, "apart", None, (), reason)
    rule = _example(primitive)
    family = TABLE[name].__module__.rpartition(".")[2] if name in TABLE else "elementwise"
    if rule is None or rule.expression is None:
        return Row(name, "unknown", None, (), rule.reason if rule else f"nobody described the primitive `{name}`.")
    operands = rule.expression.operands
    return Row(
        name, family, str(rule.expression), tuple(_split_text(s, operands) for s in rule.splits(_BLOCKS)), rule.reason
    )


def _split_text(split: Split, operands: tuple[str, ...]) -> str:
    """An index with its halos and its reducer."""
    halos = [
        f"{name} with halo {slot.halo}" for name, slot in zip(operands, split.operands, strict=True) if any(slot.halo)
    ]
    reducers = sorted({slot.reducer for slot in split.results if slot.reducer})
    told = [f"partial {reducer}" for reducer in reducers] + halos
    return f"{split.index} ({', '.join(told)})" if told else split.index


@cache
def _samples() -> dict[str, Any]:
    from shardplan.rules.samples import samples  # brings in Pallas, which takes a while

    return samples()


def _example(primitive: Primitive) -> Rule | None:
    """The rule of the primitive's example, or of the first operands on which it is elementwise."""
    sample = _samples().get(primitive.name)
    if sample is not None:
        closed = jax.make_jaxpr(sample.function)(*sample.operands)
        found = [e for e in all_equations(closed.jaxpr) if e.primitive is primitive]
        return _rule(found[-1]) if found else None
    for dtype in _TRIED_DTYPES:
        for count in _TRIED_COUNTS:
            operands = [jax.ShapeDtypeStruct((8, 8), dtype)] * count
            try:
                results = jax.tree.leaves(jax.eval_shape(primitive.bind, *operands))
            except Exception:  # wrong number of operands, or of another dtype
                continue
            rule = derive(primitive, {}, operands, results)
            if rule.known:
                return rule
    return None


def _rule(equation: Any) -> Rule:
    avals = [[v.aval for v in side] for side in (equation.invars, equation.outvars)]
    return derive(equation.primitive, equation.params, *avals)


def coverage_markdown() -> str:
    """The rows as the document ``docs/rules.md``."""
    rows = coverage()
    computing = [row for row in rows if row.family != "apart"]
    described = [row for row in computing if row.expression]
    splitting = [row for row in described if row.splits]
    lines = [
        "# What the rules cover",
        "",
        f"Generated by `shardplan rules` from JAX {jax.__version__}; a test holds it against the code.",
        "",
        f"JAX lowers {len(rows)} primitives. {len(computing)} of them compute; {len(described)} of these have an index "
        f"expression, and {len(splitting)} split along at least one index. The other {len(rows) - len(computing)} are "
        "listed at the end, with the reason.",
        "",
        *_HOW_TO_READ.splitlines(),
        "",
    ]
    for family in sorted({row.family for row in computing}):
        lines += [
            f"## {family.replace('_', ' ').capitalize()}",
            "",
            "| primitive | expression | splits |",
            "|---|---|---|",
        ]
        lines += [
            f"| `{row.name}` | {_code(row.expression)} | {', '.join(row.splits) or row.reason} |"
            for row in computing
            if row.family == family
        ]
        lines.append("")
    lines += ["## Without a split", "", "| reason | primitives |", "|---|---|"]
    for reason in WITHOUT_RULE:
        names = ", ".join(f"`{row.name}`" for row in rows if row.reason == reason)
        if names:  # this JAX has some of them
            lines.append(f"| {reason} | {names} |")
    return "\n".join(lines) + "\n"


def _code(expression: str | None) -> str:
    return "; ".join(f"`{part}`" for part in (expression or "").split("; ")).replace("|", "\\|")
