"""A program as Python functions: one for each repeated layer, for each body of a loop and each island, and the step.

Variables have the name of the operation that makes them. An expression that one statement reads is written inside of
it, as long as lines stay short. Parts that repeat, as layers do, become calls of one function (`folding`).
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import Any

from shardplan import _jax
from shardplan.errors import ArgumentError
from shardplan.source.bundles import Part, bundle
from shardplan.source.equations import Atom, Body, Equation, Number, PlaceOf, body_of, variables
from shardplan.source.expressions import Expression, expression
from shardplan.source.folding import repeats
from shardplan.source.literals import literal
from shardplan.source.statements import Statement, number_of

_WIDTH = 118
_INLINE = 84
"""The longest expression that is written inside of another one."""

_SHARED = 0.7
"""The least share of a part's statements in the module that gives its name."""

_WAITING = 3
"""The most expressions that wait for the statement that reads them."""

_PLACE = re.compile("§(\\d+)§")

_PASSING = frozenset({"sharding_constraint", "convert_element_type", "reshape", "transpose", "copy", "squeeze"})
"""Operations whose result has the name of what they read."""

_SHORT = {
    **{"dot_general": "dot", "reduce_sum": "total", "broadcast_in_dim": "broad", "conv_general_dilated": "conv"},
    **{"integer_pow": "power", "select_n": "chosen", "reduce_max": "most", "reduce_min": "least", "add_any": "add"},
    **{"shard_map": "island", "scatter-add": "scattered", "optimization_barrier": "behind", "sub": "sub"},
}


@dataclass(slots=True)
class Names:
    """Names that are taken once.

    >>> names = Names()
    >>> [names.new(wanted) for wanted in ("state", "state", "lax", "a b", "2")]
    ['state', 'state_2', 'lax_1', 'a_b', '_2']
    """

    taken: Counter[str] = field(default_factory=Counter)

    def new(self, wanted: str) -> str:
        base = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        base = f"_{base}" if base[0].isdigit() else base
        self.taken[base] += 1
        count = self.taken[base]
        return self.new(f"{base}_{count}") if count > 1 or base in RESERVED else base


_OF_THE_FILE = """
jax jnp np lax P split island scanned by_path path_text shardings sharded make_mesh step given leaves primitives MESH
ARGUMENTS RESULTS Layout NamedSharding AxisType fnmatchcase with_layout_constraint
"""

RESERVED = frozenset([*dir(builtins), *keyword.kwlist, *_OF_THE_FILE.split()])


class Writer:
    """The functions of a text. ``place_of`` gives the comment of an equation."""

    def __init__(self, place_of: PlaceOf) -> None:
        self.place_of = place_of
        self.functions: dict[str, str] = {}
        """The name of each function, by its text with `§name§` in the place of the name."""
        self.names = Names(Counter(RESERVED))
        self.parts: list[Part] = []
        self.constants: dict[int, Any] = {}
        """The closed-over arrays, by their `id`."""

    def constant(self, array: Any) -> str:
        """The name of a closed-over array."""
        self.constants.setdefault(id(array), array)
        return f"CONSTANT_{list(self.constants).index(id(array))}"

    # ---- functions

    def function(self, wanted: str, parameters: str, lines: Sequence[str]) -> str:
        """The name of a function with this text, which is written once."""
        text = "\n".join([f"def §name§({parameters}):", *(f"    {line}" if line else "" for line in lines)])
        if text not in self.functions:
            self.functions[text] = self.names.new(wanted)
        return self.functions[text]

    def step(
        self, body: Body, inputs: Mapping[int, str], hints: Mapping[int, str], parameters: Iterable[str]
    ) -> list[str]:
        """The lines of the whole program, and its outputs.

        ``inputs`` are the texts of its arguments, ``parameters`` the names that are taken by then."""
        self.names.taken.update(parameters)
        statements = self.statements(body, hints)
        inside = self._inside(body)
        inside.names.taken.update(parameters)
        inside.texts.update(inputs)
        inside.hints.update(hints)
        lines = inside.statements(statements)
        outputs = ", ".join(
            number_of(one, True) if isinstance(one, Number) else inside.text(one) for one in body.outputs
        )
        return [*lines, *_broken(f"leaves\x00=\x00[{outputs}]")]

    def _inside(self, body: Body) -> Inside:
        """The lines of a new function, whose variables have other names than the functions so far."""
        return Inside(
            self, body, Names(Counter([*RESERVED, *self.functions.values(), *(part.name for part in self.parts)]))
        )

    def texts(self) -> list[str]:
        """All functions, those first that others call."""
        named = [*self.functions.items(), *((part.text(), part.name) for part in self.parts)]
        return [_wrapped_def(text.replace("§name§", name, 1)) for text, name in named]

    def body_function(self, closed: Any, wanted: str) -> str:
        """A function of a body, whose parameters are its inputs, and which returns a tuple of its outputs."""
        body = body_of(closed, self.place_of)
        statements = self.statements(body)
        inside = self._inside(body)
        given = [inside.parameter(one, "x") for one in body.inputs]
        lines = inside.statements(statements)
        return self.function(wanted, ", ".join(given), [*lines, f"return {_tuple(inside.atoms(body.outputs))}"])

    # ---- statements

    def statements(self, body: Body, hints: Mapping[int, str] | None = None) -> list[Statement]:
        """The statements of a body. With ``hints``, the names of its inputs, its repeated parts are calls."""
        found = [self._statement(body, equation) for equation in body.equations]
        return found if hints is None else self._folded(body, found, hints)

    def _statement(self, body: Body, equation: Equation) -> Statement:
        operands = [body.type_of(atom) for atom in equation.operands]
        results = [body.types[r] if r is not None else None for r in equation.results]
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        if equation.name in special:
            made = special[equation.name](equation)
        else:
            made = expression(equation.name, equation.params, operands, results, equation.primitive)
        if len(results) == 1 and equation.name in (*special, "split", "unstack"):
            made = replace(made, text=f"{made.text}[0]")
        types = tuple(str(getattr(aval, "str_short", lambda aval=aval: str(aval))()) for aval in (*operands, *results))
        name = _SHORT.get(equation.name, equation.name.replace("-", "_"))
        return Statement(made, equation.operands, equation.results, name, equation.place, types)

    def _shard_map(self, equation: Equation) -> Expression:
        params = equation.params
        closed = _jax.ClosedJaxpr(params["jaxpr"], ())
        name = self.body_function(closed, _island_name(params["jaxpr"]))
        given = ", ".join(f"§{number}§" for number in range(len(equation.operands)))
        specs = f"{_specs(params['in_specs'])}, {_specs(params['out_specs'])}"
        axes = (
            ""
            if set(params["newly_manual_axes"]) == set(params["mesh"].axis_names)
            else (f", axes={sorted(params['newly_manual_axes'])!r}".replace("'", '"'))
        )
        check = ", check_vma=True" if params["check_vma"] else ""
        return Expression(f"island({name}, {specs}{axes}{check})({given})")

    def _scan(self, equation: Equation) -> Expression:
        params = equation.params
        constants, carries = params["num_consts"], params["num_carry"]
        body = self.body_function(params["jaxpr"], "loop_body")
        places = [f"§{number}§" for number in range(len(equation.operands))]
        outer, carry, stacks = (
            places[:constants],
            places[constants : constants + carries],
            places[constants + carries :],
        )
        more = "".join(
            f", {n}={literal(params[n])}" for n, usual in (("reverse", False), ("unroll", 1)) if params[n] != usual
        )
        return Expression(
            f"scanned({body}, {_tuple(outer)}, {_tuple(carry)}, {_tuple(stacks)}, length={params['length']}{more})"
        )

    def _while(self, equation: Equation) -> Expression:
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        test = self.body_function(params["cond_jaxpr"], "goes_on")
        body = self.body_function(params["body_jaxpr"], "loop_body")
        places = [f"§{number}§" for number in range(len(equation.operands))]
        return Expression(
            f"lax.while_loop(lambda carry: {test}({', '.join([*places[:first], '*carry'])})[0], "
            f"lambda carry: {body}({', '.join([*places[first : first + second], '*carry'])}), "
            f"{_tuple(places[first + second :])})"
        )

    def _cond(self, equation: Equation) -> Expression:
        branches = [self.body_function(branch, "branch") for branch in equation.params["branches"]]
        given = "".join(f", §{number}§" for number in range(1, len(equation.operands)))
        return Expression(f"lax.switch(§0§, [{', '.join(branches)}]{given})")

    # ---- repeated parts

    def _folded(self, body: Body, statements: list[Statement], hints: Mapping[int, str]) -> list[Statement]:
        numbers: dict[Any, int] = {}
        tokens = [numbers.setdefault(one.token, len(numbers)) for one in statements]
        uses = _Uses(statements, body.outputs, hints)
        found, done = list[Statement](), 0
        for run in repeats(tokens):
            shift = min(range(run.slack + 1), key=lambda one: uses.crossing(run.start + one, run.length))
            starts = [run.start + shift + copy * run.length for copy in range(run.copies)]
            found += statements[done : starts[0]]
            found += self._calls(body, statements, uses, starts, run.length)
            done = starts[-1] + run.length
        found += statements[done:]
        bundle(self.parts, found, variables(body.outputs), len(body.types))
        return found

    def _calls(
        self, body: Body, statements: list[Statement], uses: _Uses, starts: Sequence[int], length: int
    ) -> list[Statement]:
        """Copies of a part as calls of functions, one for all that pass values in the same way."""
        flows: dict[Any, list[int]] = {}
        for start in starts:
            flows.setdefault(uses.flow(start, length), []).append(start)
        calls: dict[int, Statement] = {}
        for equal in flows.values():
            if len(equal) > 1:
                calls |= self._function_of(body, statements, uses, equal, length)
        found: list[Statement] = []
        for start in starts:
            found += [calls[start]] if start in calls else statements[start : start + length]
        return found

    def _function_of(
        self, body: Body, statements: list[Statement], uses: _Uses, starts: Sequence[int], length: int
    ) -> dict[int, Statement]:
        """A function of the part that begins at each start, and the calls of it."""
        parameters: dict[tuple[int, ...], int] = {}
        renamed: dict[int, int] = {}  # of the first copy: variables to those of the function
        part: list[Statement] = []
        first = starts[0]
        for place in range(length):
            one, operands = statements[first + place], list[Atom]()
            for number, atom in enumerate(one.operands):
                if isinstance(atom, Number) or atom in renamed:
                    operands.append(atom)
                else:
                    given = tuple(variables([statements[s + place].operands[number] for s in starts]))
                    operands.append(parameters.setdefault(given, -1 - len(parameters)))
            part.append(replace(one, operands=tuple(operands)))
            renamed.update({r: r for r in one.results if r is not None})
        read = [
            (place, number)
            for place in range(length)
            for number, _ in enumerate(statements[first + place].results)
            if any(uses.leaves(statements[s + place].results[number], s, s + length) for s in starts)
        ]
        returned = [statements[first + place].results[number] for place, number in read]
        inside = self._inside(body)
        for copies, variable in parameters.items():
            inside.hints[variable] = uses.hints.get(copies[0], "x")
            inside.texts[variable] = inside.names.new(inside.hints[variable])
        names = [inside.texts[variable] for variable in parameters.values()]
        lines = inside.statements(part, [r for r in returned if r is not None])
        title = _title(one.place for one in part)
        made = Part(
            self.names.new(_function_name(title)), title, names, lines, [inside.text(r) for r in variables(returned)]
        )
        hints = tuple(inside.hints[variable] for variable in variables(returned))
        for copy, start in enumerate(starts):
            results = tuple(statements[start + place].results[number] for place, number in read)
            places = ", ".join(f"§{number}§" for number in range(len(parameters)))
            passed = tuple(values[copy] for values in parameters)
            call = Expression(f"{made.name}({places})")
            made.calls.append(Statement(call, passed, results, "", "", result_names=hints))
        self.parts.append(made)
        return dict(zip(starts, made.calls, strict=True))


class _Uses:
    """Where variables are made and read."""

    def __init__(self, statements: Sequence[Statement], outputs: Sequence[Atom], hints: Mapping[int, str]) -> None:
        self.statements = statements
        made = ((r, (place, n)) for place, one in enumerate(statements) for n, r in enumerate(one.results))
        self.made = {result: place for result, place in made if result is not None}
        self.hints = dict(hints)
        self.last: dict[int, int] = {}
        self.first: dict[int, int] = {}
        for place, one in enumerate(statements):
            passed = one.operands[0] if one.name in _PASSING and one.operands else None
            name = self.hints.get(passed, "x") if isinstance(passed, int) else one.name
            self.hints.update(dict.fromkeys(variables(one.results), name))
            for variable in variables(one.operands):
                self.last[variable] = place
                self.first.setdefault(variable, place)
        self.last.update(dict.fromkeys(variables(outputs), len(statements)))

    def crossing(self, place: int, length: int) -> int:
        """How many values of one part the next one reads, if parts begin at a place."""
        inside = (r for one in self.statements[max(0, place - length) : place] for r in one.results if r is not None)
        return sum(place <= self.last.get(one, -1) < place + length for one in inside)

    def flow(self, start: int, length: int) -> tuple[Any, ...]:
        """Where the operands of a part come from: a statement of it, by its place, or from outside."""
        found: list[Any] = []
        for one in self.statements[start : start + length]:
            for atom in variables(one.operands):
                place, number = self.made.get(atom, (-1, 0))
                found.append((place - start, number) if start <= place < start + length else None)
            found.append(tuple(r is None for r in one.results))
        return tuple(found)

    def leaves(self, variable: int | None, start: int, end: int) -> bool:
        """Whether anything outside of a part reads a variable that it makes."""
        return variable is not None and self.last.get(variable, -1) >= end


class Inside:
    """The lines of one function: the texts of its variables, and expressions that wait for their reader."""

    def __init__(self, writer: Writer, body: Body, names: Names) -> None:
        self.writer, self.body, self.names = writer, body, names
        self.texts: dict[int, str] = {}
        self.hints: dict[int, str] = {}
        self._waiting: dict[int, tuple[str, Expression, Statement]] = {}
        self._place = ""

    def parameter(self, variable: int, wanted: str) -> str:
        self.texts[variable] = self.names.new(wanted)
        return self.texts[variable]

    def _base(self, one: Statement) -> str:
        """The name of what a statement makes: that of the operation, or of what it passes on."""
        passed = one.operands[0] if one.name in _PASSING and one.operands else None
        return self.hints.get(passed, "x") if isinstance(passed, int) else one.name

    def statements(self, statements: Sequence[Statement], outputs: Iterable[int] = ()) -> list[str]:
        """The lines of some statements. ``outputs`` are read behind them."""
        reads: Counter[int] = Counter(v for one in statements for v in variables(one.operands))
        reads.update({v: 2 for v in (*outputs, *variables(self.body.outputs))})
        lines: list[str] = []
        for one in statements:
            consumed = set(variables(one.operands))
            names = one.result_names or (self._base(one),) * len(one.results)
            self.hints.update({r: name for r, name in zip(one.results, names, strict=True) if r is not None})
            made = self._filled(one)
            single = len(one.results) == 1 and one.results[0] is not None
            if single and reads[one.results[0]] == 1 and len(made) <= _INLINE and not one.result_names:  # type: ignore[index]
                self._forget(consumed)
                self._waiting[one.results[0]] = (made, one.expression, one)  # type: ignore[index]
                while len(self._waiting) > _WAITING:
                    lines += self._emit(next(iter(self._waiting)))
                continue
            for variable in [v for v in self._waiting if v not in consumed]:
                lines += self._emit(variable)
            made = self._filled(one)
            self._forget(consumed)
            lines += self._assigned(one, made)
        for variable in list(self._waiting):
            lines += self._emit(variable)
        return lines

    def _forget(self, consumed: set[int]) -> None:
        for variable in consumed:
            self._waiting.pop(variable, None)

    def _emit(self, variable: int) -> list[str]:
        made, _, one = self._waiting.pop(variable)
        return self._assigned(one, made)

    def _assigned(self, one: Statement, made: str) -> list[str]:
        targets = []
        for result in one.results:
            if result is None:
                targets.append("_")
                continue
            self.texts[result] = self.names.new(self.hints[result])
            targets.append(self.texts[result])
        left = ", ".join(targets)
        comment = [f"# {one.place}"] if one.place and one.place != self._place else []
        self._place = one.place or self._place
        return [*comment, *wrapped(f"{left} = {made}")]

    def _filled(self, one: Statement) -> str:
        """The text of an expression with its operands."""

        def text(match: re.Match[str]) -> str:
            atom = one.operands[int(match[1])]
            if isinstance(atom, Number):
                others = [other for other in one.operands if isinstance(other, int)]
                found = number_of(atom, one.expression.typed or not others)
                return f"({found})" if one.expression.wraps and found.startswith("-") else found
            if atom in self._waiting:
                made, inner, _ = self._waiting[atom]
                return made if inner.tight or not one.expression.wraps else f"({made})"
            return self.text(atom)

        return _PLACE.sub(text, one.expression.text)

    def text(self, variable: int) -> str:
        if variable in self.texts:
            return self.texts[variable]
        if variable in self.body.constants:
            return self.writer.constant(self.body.constants[variable])
        raise ArgumentError(f"to_python() found a variable without a statement: {variable}")

    def atoms(self, atoms: Sequence[Atom | None]) -> list[str]:
        """The texts of variables and numbers."""
        given = [one for one in atoms if one is not None]
        return [number_of(one, True) if isinstance(one, Number) else self.text(one) for one in given]


def _tuple(texts: Sequence[str]) -> str:
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _cut(texts: Sequence[str], first: int, second: int) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Three parts of a list."""
    return texts[:first], texts[first:second], texts[second:]


def _specs(specs: Sequence[Any]) -> str:
    return _tuple([literal(spec) for spec in specs])


def _island_name(jaxpr: Any) -> str:
    """The name of an island, by the two operations that say most of it."""
    names = [_SHORT.get(e.primitive.name, e.primitive.name.replace("-", "_")) for e in jaxpr.eqns]
    known = [n for n in names if n in ("dot", "conv", "psum", "reduce_scatter", "layout_constraint", "total", "gather")]
    chosen = list(dict.fromkeys(known or names))[:2]
    return "_and_".join(chosen).replace("layout_constraint", "ordered") or "blocks"


def _title(places: Iterable[str]) -> str:
    """The innermost module in which most statements of a part are.

    >>> _title(["forward Net/Block/up", "forward Net/Block/down", "forward Net/Block"])
    'forward Net/Block'
    """
    inside: Counter[str] = Counter()
    known = [place for place in places if place]
    for place in known:
        phase, _, path = place.partition(" ")
        modules = path.split("/") if path else []
        inside.update(" ".join([phase, "/".join(modules[:depth])]).strip() for depth in range(len(modules) + 1))
    shared = [place for place, count in inside.items() if count >= _SHARED * len(known)]
    return max(shared, key=len, default="a repeated part")


def _function_name(title: str) -> str:
    words = re.findall(r"[A-Za-z]\w*", title)
    return "_".join(dict.fromkeys(w.lower().strip("_") for w in (*words[:1], *words[1:][-2:]))) or "part"


def wrapped(line: str) -> list[str]:
    """A line, broken inside of its parentheses where it is too long."""
    if len(line) <= _WIDTH - 4:
        return [line]
    left, separator, right = line.partition(" = ")
    if not separator:
        left, right = "", line
    if len(left) > 60:
        left = f"({left})"
    else:
        left = left.replace(" ", "\x00")
    if not _is_call(right):
        right = f"({right})"
    joined = f"{left}\x00=\x00{right}" if separator else right
    return _broken(joined)


def _is_call(text: str) -> bool:
    """Whether a text is one call of a named function.

    >>> _is_call("f(x, (1,))"), _is_call("f(x) + g(y)"), _is_call("x + f(y)")
    (True, False, False)
    """
    name, _, rest = text.partition("(")
    depth = 1
    for place, character in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return name.replace(".", "").isidentifier() and place == len(rest) - 1
    return False


def _broken(text: str) -> list[str]:
    """A text as lines, broken at spaces outside of quotes. `\x00` is a space that stays."""
    kept = re.sub(r'"[^"\n]*"', lambda quoted: quoted[0].replace(" ", "\x00"), text)
    lines = wrap(kept, _WIDTH - 4, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\x00", " ") for line in lines]


def _wrapped_def(text: str) -> str:
    """A function whose first line is broken where it is too long, and its return as well."""
    first, *rest = text.split("\n")
    lines = _broken(first.replace("def ", "def\x00")) if len(first) > _WIDTH else [first]
    found = list(lines)
    for line in rest:
        if line.startswith("    return ") and len(line) > _WIDTH:
            found += [f"    {one}" for one in _broken(line.strip().replace("return ", "return\x00"))]
        else:
            found += [f"    {one}" for one in wrapped(line.strip())] if len(line) > _WIDTH else [line]
    return "\n".join(found)
