"""Replaying: the program run again with a constraint at every planned place, for XLA to compile.

Operands are constrained to what the strategy needs. Results are constrained twice: to the layout that the operation
itself gives, where partial results have been reduced, then to the planned one; with the planned one alone XLA was
measured to recompute large parts of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.apply.islands import Island, made_in, run_on_blocks
from shardplan.apply.wire_dtype import sent_dtype, sent_in
from shardplan.apply.workarounds.loop_carry_init import fill_late
from shardplan.apply.workarounds.loop_stack_init import begun_apart, scan_begun
from shardplan.apply.workarounds.pin_dimension_order import gathered_slices, in_order, is_gathered_out_of_order, ordered
from shardplan.apply.workarounds.regather_barriers import behind_barrier
from shardplan.apply.workarounds.separate_padding import padded_apart
from shardplan.layout.collectives import CollectiveKind, Step, ends_of
from shardplan.layout.layout import Layout, replicated, to_spec
from shardplan.problem.loop_carry_sums import in_parts
from shardplan.problem.maxima import bind_integers, compared_as_integers, from_integers
from shardplan.problem.ops.gather import adding_block, clamp_start, filled, fills, unfilled_params
from shardplan.problem.ops.ragged_dot import on_blocks, splits_rows_or_groups
from shardplan.problem.ops.slice import read_block, reads_place
from shardplan.problem.ops.update_slice import splits_places, update_block
from shardplan.problem.schedule import Schedule
from shardplan.problem.strategy import Strategy
from shardplan.problem.wire_dtype import widened_terms
from shardplan.problem.xla_limits import needs_shard_map, params_of_block, shard_map_axes
from shardplan.program.control_flow import Link, Links, scope_of_trips
from shardplan.program.program import Constant, Operation
from shardplan.program.regions._jax import manual_region


class Replay:
    """One run of a schedule under a trace of ``jax.jit``."""

    def __init__(self, schedule: Schedule, mesh: Mesh) -> None:
        self._schedule = schedule
        self._program = schedule.program
        self._mesh = mesh
        self._held: dict[tuple[int, Layout], Any] = {}
        self._makers = self._program.makers
        self._pinned_slices = gathered_slices(schedule)
        on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
        self._unrounded = widened_terms(self._program) if on_cpu else frozenset[int]()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the program on traced inputs; returns its results in the order of the flattened outputs."""
        taken = zip(inputs, self._program.inputs, strict=True)  # types over devices that are only described say no kind
        self._hold(self._program.inputs, [self._in_own_memory(value, array) for array, value in taken])
        for value in (self._program.inputs[position] for position in self._program.refs):
            layout = self._schedule.assignment.values[value]
            # jit takes no layouts of keywords, and a reference's type says none
            self._held[value, layout] = self._constrain(self._held[value, layout], layout)
        captured = self._program.captured
        self._hold(captured, [a[...] if isinstance(a, _jax.Ref) else a for a in captured.values()])
        self._run_region(0)
        with jax.named_scope("output"):
            return [
                self._read(value, self._schedule.layout_of_output(n)) if isinstance(value, int) else _as_array(value)
                for n, value in enumerate(self._program.outputs)
            ]

    def _hold(self, values: Iterable[int], arrays: Iterable[Any]) -> None:
        """Takes arrays as values in their planned layouts."""
        layouts = self._schedule.assignment.values
        self._held.update({(value, layouts[value]): array for value, array in zip(values, arrays, strict=True)})

    def _run_region(self, region: int) -> None:
        for index in self._program.regions[region].operations:
            operation = self._program.operations[index]
            with jax.named_scope(operation.scopes):
                if operation.bodies:
                    self._run_bodies(operation)
                elif index in self._schedule.assignment.strategies:
                    self._run(operation)

    # ---- loops and branches

    def _run_bodies(self, operation: Operation) -> None:
        links = self._schedule.problem.links[operation.index]
        operands = fill_late(self._schedule, self._mesh, operation, [self._entering(link) for link in links.enter])
        run = {"scan": self._scan, "while": self._while}.get(operation.primitive.name, self._branch)
        results = list(run(operation, links, operands))
        layouts = self._schedule.assignment.values
        for position, value in enumerate(operation.results):
            if value in self._schedule.problem.stacks and self._schedule.is_partial(value, layouts[value]):
                results[position] = jax.numpy.swapaxes(results[position], 0, 1)  # a partial tensor's parts are in front
        placed = map(self._constrain, results, [layouts[value] for value in operation.results])
        self._hold(operation.results, placed)

    @contextmanager
    def _inside(self, region: int, inputs: Sequence[Any]) -> Iterator[None]:
        """Runs a body on arrays; what is read inside is traced inside, and must not be read outside."""
        outside, self._held = self._held, dict(self._held)
        values = self._program.regions[region].inputs
        layouts = self._schedule.assignment.values
        self._hold(values, [self._constrain(a, layouts[v]) for v, a in zip(values, inputs, strict=True)])
        self._run_region(region)
        yield
        self._held = outside

    def _body(self, region: int, links: Sequence[Link], inputs: Sequence[Any]) -> list[Any]:
        """What the links read of a body."""
        with self._inside(region, inputs):
            return [self._read_link(link) for link in links]

    def _scan(self, operation: Operation, links: Links, operands: Sequence[Any]) -> Sequence[Any]:
        params = operation.params
        constants, carries = params["num_consts"], params["num_carry"]

        def body(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
            inputs = (*operands[:constants], *carry, *self._pinned(operation, slices))
            results = self._body(operation.bodies[0], links.inside, inputs)
            return tuple(results[:carries]), tuple(results[carries:])

        if operation.index in begun_apart(self._schedule):
            return scan_begun(self._schedule, self._mesh, operation, operands, body)
        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        entering, slices = tuple(operands[constants : constants + carries]), tuple(operands[constants + carries :])
        carry, stacks = jax.lax.scan(body, entering, slices, **settings)
        return (*carry, *stacks)

    def _pinned(self, operation: Operation, slices: Sequence[Any]) -> Iterator[Any]:
        """The slices that a scan runs over, pinned to the order of their stacks where XLA would copy these."""
        values = self._program.regions[operation.bodies[0]].inputs
        for value, one in zip(values[len(values) - len(slices) :], slices, strict=True):
            layout = self._schedule.assignment.values.get(value, ())
            yield in_order(one, layout, self._schedule, self._mesh) if value in self._pinned_slices else one

    def _while(self, operation: Operation, links: Links, operands: Sequence[Any]) -> Sequence[Any]:
        condition, body = operation.bodies
        first, second = operation.params["cond_nconsts"], operation.params["body_nconsts"]
        test = self._program.regions[condition].outputs[0]

        def proceed(carry: Sequence[Any]) -> Any:
            with self._inside(condition, (*operands[:first], *carry)):
                return self._read(test, ())

        def step(carry: Sequence[Any]) -> Any:
            return tuple(self._body(body, links.inside, (*operands[first : first + second], *carry)))

        trips = self._program.trips(operation)
        with nullcontext() if trips is None else scope_of_trips(trips):
            return jax.lax.while_loop(proceed, step, tuple(operands[first + second :]))

    def _branch(self, operation: Operation, links: Links, operands: Sequence[Any]) -> Sequence[Any]:
        count, wide = len(operation.results), len(operation.operands) - 1
        branches = [
            partial(self._branch_body, region, links.inside[number * count : (number + 1) * count])
            for number, region in enumerate(operation.bodies)
        ]
        chosen = self._read(operation.operands[0], ())
        # each branch has its own copies of the operands, in its own layouts
        return jax.lax.switch(chosen, [_taking(b, n * wide, (n + 1) * wide) for n, b in enumerate(branches)], *operands)

    def _branch_body(self, region: int, links: Sequence[Link], *inputs: Any) -> tuple[Any, ...]:
        return tuple(self._body(region, links, inputs))

    def _entering(self, link: Link) -> Any:
        """What enters a loop or a branch; of a stack that is still a sum, the slices in front of the parts."""
        array, layout = self._read_link(link), self._schedule.link_layout(link)
        wanted = self._schedule.assignment.values.get(link.target, ())
        if link.begins and len(wanted) > len(layout):
            return in_parts(array, layout, wanted, self._mesh, self._schedule.space.mesh)
        partial_stack = link.stacked and isinstance(link.source, int) and self._schedule.is_partial(link.source, layout)
        return jax.numpy.swapaxes(array, 0, 1) if partial_stack else array

    def _read_link(self, link: Link) -> Any:
        if isinstance(link.source, Constant):
            return _as_array(link.source)
        return self._read(link.source, self._schedule.link_layout(link))

    # ---- operations

    def _run(self, operation: Operation) -> None:
        strategy = self._schedule.assignment.strategies[operation.index]
        operands = clamp_start(operation, self._read_operands(operation, strategy))
        travelling = self._schedule.island_dtype(operation)
        linear = self._linear(operation, strategy)
        filling = travelling is None and fills(operation) and self._scatters(operation)
        extreme = compared_as_integers(self._program, operation, strategy)
        done = [0] * len(operation.results)
        if travelling is not None:
            results, done = self._run_island(operation, strategy, operands, travelling)
        elif linear:
            results, done = self._run_partial(operation, strategy, operands, linear)
        elif self._schedule.problem.islands and needs_shard_map(operation, strategy):
            results = self._run_apart(operation, strategy, operands)
        elif splits_places(operation, strategy):
            results = self._update_place(operation, strategy, operands)
        elif apart := shard_map_axes(operation, strategy, self._schedule.space.mesh.splitting):
            results = self._run_over_axes(operation, strategy, operands, apart)
        elif extreme:
            results = bind_integers(operation, operands, extreme)
        elif filling:
            results = _jax.bind_again(operation.equation, operation.primitive, unfilled_params(operation), operands)
        else:
            results = self._bind(operation, operands)
        for position, (index, result) in enumerate(zip(operation.results, results, strict=True)):
            steps = self._schedule.result_steps(operation, position)[done[position] :]
            placed = (
                travelling is not None or done[position] or (index in self._unrounded and not any(strategy.pending))
            )
            held = result if placed else self._constrain(result, strategy.results[position])
            for step in ends_of(steps):
                if step.layout != strategy.results[position] or not strategy.pending[position]:
                    held = self._in_own_memory(index, self._constrain(_jax.moved(held, None), step.layout))
                if extreme and step.kind.reduces:
                    held = self._constrain(from_integers(held, self._program.values[index].dtype), step.layout)
            planned = self._schedule.assignment.values[index]
            if filling:
                held = self._constrain(filled(operation, operands[0].shape, operands[1], held), planned)
            self._held[index, planned] = held

    def _scatters(self, operation: Operation) -> bool:
        """Whether the partial results of an operation with one result are scattered."""
        return any(step.kind == CollectiveKind.REDUCE_SCATTER for step in self._schedule.result_steps(operation, 0))

    def _read_operands(self, operation: Operation, strategy: Strategy) -> Sequence[Any]:
        for operand, layout in zip(operation.operands, strategy.operands, strict=True):
            if isinstance(operand, int) and layout is not None and operand not in self._schedule.assignment.generated:
                stored = self._schedule.assignment.values[operand]
                if (operand, layout) in self._held and self._schedule.is_regathered(operand, layout):
                    # else XLA merges equal reshards; constrained again, or Shardy gives what is read here to later ones
                    passed = behind_barrier(self._held[operand, stored], sent_dtype(self._schedule, operand))
                    self._held[operand, stored] = self._constrain(passed, stored)
                    for step in self._schedule.route(operand, layout).steps:
                        self._held.pop((operand, step.layout), None)
        read = list(map(self._read, operation.operands, strategy.operands))
        return padded_apart(self._schedule, operation, read, self._constrain)

    def _bind(self, operation: Operation, operands: Sequence[Any]) -> tuple[Any, ...]:
        primitive, params = operation.primitive, operation.params
        if primitive.name == "shard_map":
            primitive, params = manual_region(operation.equation)
        return _jax.bind_again(operation.equation, primitive, params, operands)

    def _run_island(
        self, operation: Operation, strategy: Strategy, operands: Sequence[Any], travelling: Any
    ) -> tuple[tuple[Any, ...], list[int]]:
        """Runs an operation block by block, with explicit reductions; gives its results and how many steps it did."""
        steps = [s for s in self._schedule.result_steps(operation, 0) if s.kind.reduces]
        island = Island(self._mesh, self._schedule.space.mesh, tuple(sorted(strategy.pending[0])), steps, travelling)
        own, dtype = strategy.results[0], self._program.values[operation.results[0]].dtype
        blocks = self._on_blocks(operation, strategy, travelling)
        result = run_on_blocks(blocks, operands, strategy.operands, own, island, dtype)
        return (result,), [len(steps)]

    def _run_apart(self, operation: Operation, strategy: Strategy, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Runs an operation on blocks that need nothing of each other; results are split as what is read is."""
        params = params_of_block(operation, strategy, self._schedule.space.mesh.degree)

        def blocks(*local: Any) -> tuple[Any, ...]:
            results = _jax.bind_again(operation.equation, operation.primitive, params, local)
            # XLA:CPU 0.10.2 may let a transform lie as what reads it does, and then fails
            return tuple(map(ordered, results)) if operation.primitive.name == "fft" else results

        return self._on_all_blocks(blocks, operation, strategy, operands)

    def _update_place(self, operation: Operation, strategy: Strategy, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Updates one place, on the devices whose blocks have it."""

        def bind(params: dict[str, Any], local: Sequence[Any]) -> Any:
            return _jax.bind_again(operation.equation, operation.primitive, params, local)[0]

        update = update_block(operation, strategy, self._schedule.space.mesh, bind)
        return self._on_all_blocks(lambda *local: (update(*local),), operation, strategy, operands)

    def _run_over_axes(
        self, operation: Operation, strategy: Strategy, operands: Sequence[Any], axes: tuple[int, ...]
    ) -> tuple[Any, ...]:
        """Runs a convolution on its blocks over some mesh axes; over all others XLA splits it."""
        mesh = self._schedule.space.mesh

        def spec(layout: Layout | None) -> PartitionSpec:
            return to_spec(mesh, tuple(tuple(axis for axis in group if axis in axes) for group in layout or ()))

        mapped = jax.shard_map(
            lambda *local: self._bind(operation, local),
            mesh=self._mesh,
            in_specs=tuple(map(spec, strategy.operands)),
            out_specs=tuple(map(spec, strategy.results)),
            axis_names={mesh.names[axis] for axis in axes},
            check_vma=False,
        )
        return mapped(*operands)

    def _on_all_blocks(
        self, blocks: Callable[..., Any], operation: Operation, strategy: Strategy, operands: Sequence[Any]
    ) -> tuple[Any, ...]:
        """What every device makes of its blocks of the operands, each result split as the first operand."""
        mesh = self._schedule.space.mesh
        in_specs = tuple(to_spec(mesh, layout or ()) for layout in strategy.operands)
        out_specs = (to_spec(mesh, strategy.operands[0] or ()),) * len(operation.results)
        mapped = jax.shard_map(blocks, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*operands)

    def _on_blocks(self, operation: Operation, strategy: Strategy, travelling: Any) -> Callable[..., Any]:
        """The operation on the blocks of one device, inside of an island."""

        def bind(params: dict[str, Any], *local: Any) -> Any:
            return _jax.bind_again(operation.equation, operation.primitive, params, local)[0]

        params = params_of_block(operation, strategy, self._schedule.space.mesh.degree)
        wider = _jax.item_bytes(travelling) > _jax.item_bytes(self._program.values[operation.results[0]].dtype)
        run = made_in(travelling, operation, params, bind) if wider else partial(bind, params)
        if splits_rows_or_groups(operation, strategy):
            return on_blocks(operation, strategy, self._schedule.space.mesh, run)
        if operation.primitive.name == "gather" or reads_place(operation, strategy):
            return read_block(operation, strategy, self._schedule.space.mesh)
        if operation.primitive.name == "scatter-add":
            return adding_block(strategy, self._schedule.space.mesh, run)
        return (lambda *local: ordered(run(*local))) if self._schedule.scatters_inner_dimension(operation) else run

    def _linear(self, operation: Operation, strategy: Strategy) -> tuple[int, ...]:
        """The operands that are parts of sums which the operation passes on, none where it does not."""
        is_partial, barrier = self._schedule.is_partial, operation.primitive is _jax.optimization_barrier
        if barrier or not operation.results or not is_partial(operation.results[0], strategy.results[0]):
            return ()  # a barrier lets parts pass as they are
        places = enumerate(zip(operation.operands, strategy.operands, strict=True))
        return tuple(n for n, (o, layout) in places if isinstance(o, int) and layout and is_partial(o, layout))

    def _run_partial(
        self, operation: Operation, strategy: Strategy, operands: Sequence[Any], linear: tuple[int, ...]
    ) -> tuple[tuple[Any, ...], list[int]]:
        """Runs a linear operation on every device's part; gives its results and how many reductions it did of each."""

        def on_part(*parts: Any) -> tuple[Any, ...]:
            whole = list(operands)
            for position, part in zip(linear, parts, strict=True):
                whole[position] = part
            return tuple(self._bind(operation, whole))

        parts = [operands[position] for position in linear]
        apart = operation.primitive.name == "fft"  # XLA would gather the parts
        run = jax.vmap(on_part)
        stacked = list(self._on_all_blocks(run, operation, strategy, parts) if apart else run(*parts))
        done = []
        for number, (index, layout) in enumerate(zip(operation.results, strategy.results, strict=True)):
            steps = [step for step in self._schedule.result_steps(operation, number) if step.kind.reduces]
            done.append(len(steps))
            if steps:
                stacked[number] = self._reduced(index, self._constrain(stacked[number], layout), layout, steps)
        return tuple(stacked), done

    def _read(self, operand: int | Constant, layout: Layout | None) -> Any:
        if isinstance(operand, Constant):
            return operand.value
        layout = replicated(len(self._program.values[operand].shape)) if layout is None else layout
        if (operand, layout) not in self._held:
            if operand in self._schedule.assignment.generated:
                self._held[operand, layout] = self._generate(operand, layout)
            else:
                self._fetch(operand, layout)
        return self._held[operand, layout]

    def _fetch(self, value: int, layout: Layout) -> None:
        route = self._schedule.route(value, layout)
        held, steps = self._read(value, route.source), list(route.steps)
        if self._schedule.is_partial(value, route.source) and steps:
            reducing = [step for step in steps if step.kind.reduces]
            held = self._reduced(value, held, route.source, reducing)
            self._held[value, reducing[-1].layout] = held
            steps = steps[len(reducing) :]
        for step in ends_of(steps):
            if (value, step.layout) not in self._held:
                passed = _jax.moved(sent_in(self._schedule, value, held), None) if step.fraction else held
                brought = self._constrain(passed, step.layout)
                if is_gathered_out_of_order(self._schedule, value, step.layout):
                    brought = in_order(brought, step.layout, self._schedule, self._mesh)
                self._held[value, step.layout] = self._in_own_memory(value, brought)
            held = self._held[value, step.layout]

    def _generate(self, value: int, layout: Layout) -> Any:
        tensor = self._program.values[value]
        if self._schedule.is_partial(value, layout):  # only zeros are asked for as parts of a sum: a carry's beginning
            parts = self._schedule.space.mesh.degree(layout[0])
            return self._constrain(jax.numpy.zeros((parts, *tensor.shape), tensor.dtype), layout)
        operation = self._makers[value]
        strategy = self._schedule.generating(operation, layout)
        operands = [self._read(o, wanted) for o, wanted in zip(operation.operands, strategy.operands, strict=True)]
        made = self._constrain(self._bind(operation, operands)[0], strategy.results[0])
        return made if strategy.results[0] == layout else self._constrain(made, layout)

    def _reduced(self, value: int, parts: Any, layout: Layout, steps: Sequence[Step]) -> Any:
        """A value whose parts are stacked, reduced by these steps."""
        pending, *own = layout
        island = Island(
            self._mesh, self._schedule.space.mesh, pending, steps, self._schedule.problem.deferred_sum_dtype(value)
        )
        return island.reduce_stacked(parts, tuple(own))

    def _in_own_memory(self, value: int, array: Any) -> Any:
        """A value in the memory that its type says: collectives bring it to other layouts in that of the devices."""
        return _jax.moved(array, self._program.values[value].memory_kind)

    def _constrain(self, array: Any, layout: Layout) -> Any:
        if not _jax.is_array_type(jax.typeof(array)):
            return array
        spec = to_spec(self._schedule.space.mesh, layout)
        return jax.lax.with_sharding_constraint(array, NamedSharding(self._mesh, spec))


def _as_array(constant: Constant) -> Any:
    return _jax.array_of_type(constant.value, constant.aval)


def _taking(branch: Callable[..., Any], first: int, last: int) -> Callable[..., Any]:
    return lambda *operands: branch(*operands[first:last])
