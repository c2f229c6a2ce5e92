"""The problem: a program's cost network over a mesh.

Each value is a variable over its layouts. Each operation with a choice of its own is a variable over its strategies. A
value with several readers has one more variable, the layout of their shared copy. Costs are in the unit of the
objective.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.layout.collectives import Step
from shardplan.layout.layout import Domain, Layout, LayoutSpace, satisfies
from shardplan.layout.objectives import Prices, Timing
from shardplan.layout.shortest_paths import Priced
from shardplan.layout.transitions import Partial, Transitions, times_trips
from shardplan.memoize import memoize
from shardplan.problem.axis_symmetry import mirror_images, symmetry_labels
from shardplan.problem.coarse_meshes import coarse_choices
from shardplan.problem.deferred_sums import DeferredSums
from shardplan.problem.loop_carry_sums import initial_prices
from shardplan.problem.maxima import compared_as_integers, compared_dtype
from shardplan.problem.operation_collectives import called_steps, halo_steps
from shardplan.problem.shared_tables import SharedTables
from shardplan.problem.strategy import Choices, Strategy, barrier_strategy, passing_on, with_deferred
from shardplan.problem.sum_dtypes import deferred_dtype, reduction_dtype
from shardplan.problem.variables import Numbering, generated_values
from shardplan.problem.wire_dtype import reduced_width, sent_bytes
from shardplan.problem.xla_limits import may_be_island, needs_island, order_of_sum, scatters
from shardplan.program.clone_broadcasts import broadcast_values
from shardplan.program.control_flow import Links, layouts_read, links_of
from shardplan.program.program import Operation, Program, Value
from shardplan.search import Network


@dataclass(frozen=True, slots=True)
class Assignment:
    """A solution of the problem: layouts of values and shared copies, and the strategy of every operation."""

    values: dict[int, Layout]
    copies: dict[int, Layout]
    strategies: dict[int, Strategy]
    generated: frozenset[int]
    """Values without operands (iota, broadcast literals), generated again in every layout that is read."""


class Problem:
    """The cost network of a program, and the conversion of its solutions to layouts.

    ``shared`` has the layouts, the prices, and what is derived of them. ``fixed`` gives hard layouts of values: a tuple
    with one entry per dimension, None for a free one.
    """

    def __init__(
        self, program: Program, shared: SharedTables, fixed: Mapping[int, tuple[tuple[int, ...] | None, ...]]
    ) -> None:
        self.program, self.shared = program, shared
        self.space: LayoutSpace = shared.space
        self.prices: Prices = shared.prices
        self.transitions = shared.transitions
        self.memo: dict[Any, Any] = {}  # memoised results, see `shardplan.memoize`
        self.choices: dict[int, Choices] = {}
        self.links: dict[int, Links] = {}
        self.unknown: dict[str, list[Operation]] = {}
        self.timing: Timing | None = None
        self.traffic: Mapping[int, int] = {}  # where its bytes count
        self.reduce_dtype, self.islands = shared.reduce_dtype, shared.islands
        self._fixed = fixed
        self._barriers: set[int] = set()
        self._tables = shared.tables
        self._derive_choices()
        shared.kept += self.choices.values()
        self.generated = generated_values(program, self.choices, fixed)
        whole = (
            fixed if self.islands else dict.fromkeys(range(len(program.values)))
        )  # only islands can leave a sum partial
        self.deferred = DeferredSums(program, self.choices, self.links, whole, self.reduce_dtype)
        self.sent_bytes = sent_bytes(program)
        self._pass_on_deferred()
        self.stacks = {link.target for one in self.links.values() for link in one.inside if link.stacked == "target"}
        same = {value: carry for one in self.links.values() for value, carry in one.same.items()}
        self._leaving = program.leaving | {same[value] for value in program.leaving & same.keys()}
        self._ending = {same[value] for value in program.leaving & same.keys() - program.read}
        self._even = self._find_even()
        self._value_times = program.times_of_values()
        self.variables = Numbering(program, self.choices, self.links, self.generated, self.domain).variables()

    @cached_property
    def network(self) -> Network:
        """The cost network, built at its first use: a plan from the cache does not need it."""
        network = Network()
        parts = self.space.mesh, self.variables, self.domain, self.choices
        network.twins, network.mirror, network.restrictions = (
            symmetry_labels(*parts),
            mirror_images(*parts),
            coarse_choices(*parts),
        )
        for add in (self._add_values, self._add_copies, self._add_work, self._add_operations, self._add_outputs):
            add(network)
        return network

    def freed(self, hard: Mapping[int, tuple[tuple[int, ...] | None, ...]]) -> Problem:
        """This problem with fewer hard layouts of arguments. All but their costs is shared."""
        other = copy.copy(self)
        other._fixed = hard
        other.__dict__.pop("network", None)
        return other

    # ---- the choices of operations

    def _derive_choices(self) -> None:
        for operation in self.program.operations:
            if operation.bodies:
                self.links[operation.index] = links_of(self.program, operation)
            elif operation.primitive is _jax.optimization_barrier:
                self._barriers.add(operation.index)
            elif (given := self.shared.maker.region_choices(self.program, operation)) is not None:
                self.choices[operation.index] = given
            else:
                rule, self.choices[operation.index] = self.shared.maker.choices(self.program, operation)
                if not rule.known:
                    self.unknown.setdefault(operation.primitive.name, []).append(operation)

    def _pass_on_deferred(self) -> None:
        made = self.shared.passing
        for index, sets in self.deferred.operands.items():
            choices, domain = self.choices[index], self.domain(self.program.operations[index].results[0])
            key = (id(choices), domain, sets)
            if key not in made:
                follows = choices.follows_result
                made[key] = (
                    passing_on(choices, domain, sets[0]) if follows else with_deferred(choices, self.space.mesh, sets)
                )
            self.choices[index] = made[key]

    @memoize
    def domain(self, value: int) -> Domain:
        """The layouts of a value. Partial ones are the last."""
        tensor = self.program.values[value]
        if value not in self.deferred.values:
            return self.space.domain(tensor.shape)
        width = reduced_width(tensor, self.sent_bytes[value], self.deferred_sum_dtype(value))
        return self.space.with_partial(tensor.shape, width)

    def deferred_sum_dtype(self, value: int) -> Any:
        """The element type of a deferred sum's reduction."""
        return deferred_dtype(self.program.values[value], self.reduce_dtype)

    def times(self, operation: Operation) -> int:
        """The number of times per step that an operation runs."""
        return self.program.regions[operation.region].times

    def times_of_value(self, value: int) -> int:
        """The number of times per step that a value is made."""
        return self._value_times[value]

    def _find_even(self) -> frozenset[int]:
        """Values whose splits must be even: a jit's arguments and results, operands and results of loops, values in
        host memory."""
        into = (value for region in self.program.regions for value in region.inputs)
        on_host = (value.index for value in self.program.values if value.memory_kind is not None)
        of_loops = (result for o in self.program.operations if o.bodies for result in o.results)
        return self._leaving | {*into, *on_host, *of_loops}

    def _is_stored_evenly(self, value: int) -> bool:
        """Whether a value is split evenly though its copies may be padded: an update then reads the value itself."""
        return value in self._even and bool(self.domain(value).padded)

    def _costs_of_following(self) -> dict[int, np.ndarray]:
        """The price of an operation's work, as a cost of the result whose layout decides the operation's split."""
        found = {}
        for operation in self.program.operations:
            choices = self.choices.get(operation.index)
            if choices is not None and choices.follows_result and operation.results[0] not in self.generated:
                found[operation.results[0]] = self._work(operation)
        return found

    def _work(self, operation: Operation) -> np.ndarray:
        """The price of an operation's work and of its halos, per strategy."""
        choices, times = self.choices[operation.index], self.times(operation)
        read = (o for o in (*operation.operands, *operation.results) if isinstance(o, int))
        moving = tuple((id(self.transitions_of(value)), self.sent_bytes[value]) for value in read)
        key = (id(choices), "work", times, self.traffic.get(operation.index, 0), moving)
        if key not in self._tables:
            work = choices.flops, self.traffic.get(operation.index, 0), choices.dtype
            shared = {degree: self.prices.work(*work, degree) for degree in {s.degree for s in choices.strategies}}
            self._tables[key] = times_trips(times, [self._price_of(operation, s, shared) for s in choices.strategies])
        return self._tables[key]

    def _price_of(self, operation: Operation, strategy: Strategy, shared: Mapping[float, float]) -> float:
        if not strategy.possible or (not self.islands and needs_island(operation, strategy)):
            return np.inf
        price = shared[strategy.degree]
        for step, value in self.exchanges(operation, strategy):
            per_byte, per_collective = self.transitions_of(value.index).price(step)
            price += per_byte * self.sent_bytes[value.index] + per_collective
        return price

    def transitions_of(self, value: int) -> Transitions:
        """The transitions of a value, priced by its memory, and by the overlap of its collectives with work."""
        if self.program.values[value].memory_kind is not None:
            return self.shared.through_device
        return self.shared.overlapped if self.timing and value in self.timing.hidden else self.transitions

    def exchanges(self, operation: Operation, strategy: Strategy) -> list[tuple[Step, Value]]:
        """Halo exchanges with the tensors of their rows, and the collectives that a region calls by name."""
        results = [self.program.values[result] for result in operation.results]
        found = called_steps(self.space.mesh, strategy, results)
        for position, layout in enumerate(strategy.operands if strategy.halos else ()):
            operand, halos = operation.operands[position], [halo for halo in strategy.halos if halo.operand == position]
            if halos and isinstance(operand, int) and operand not in self.generated and layout is not None:
                value, domain = self.program.values[operand], self.domain(operand)
                found += [(step, value) for step in halo_steps(self.space.mesh, domain, layout, halos, value)]
        return found

    # ---- variables

    def _add_values(self, network: Network) -> None:
        own_costs = self._costs_of_following()
        shared = {value for links in self.links.values() for value in links.same}
        for index in self.variables.values:
            if index not in shared:
                costs = self._costs_of_value(self.program.values[index], own_costs.get(index))
                network.add_variable(costs, name=self.variables.names[len(network)])

    def _costs_of_value(self, value: Value, own: np.ndarray | None) -> np.ndarray:
        """The cost of each layout of a value: its storage, and the work of the operation that follows it."""
        domain = self.domain(value.index)
        costs = value.stored_bytes / domain.degrees * self.prices.per_byte_stored()
        if own is not None:
            costs = costs + own
        if value.index in self._even:
            costs = np.where([layout not in domain.padded for layout in domain.layouts], costs, np.inf)
        if value.index in self.program.captured:
            costs[1:] = np.inf  # closed-over arrays live on every device
        if domain.whole is not None and value.index in self._leaving:
            # the caller gets whole values: a loop's partial sums are reduced after it
            ends = value.index in self._ending
            costs[len(domain.whole) :] += self.whole_prices(value.index).min(1)[len(domain.whole) :] if ends else np.inf
        if value.index in self.stacks:
            whole = [not layout[len(layout) - domain.rank] for layout in domain.layouts]
            costs = np.where(whole, costs, np.inf)  # a loop fills a stack slice by slice
        fixed = self._fixed.get(value.index)
        if fixed is not None:
            costs = np.where([satisfies(layout, fixed) for layout in domain.layouts], costs, np.inf)
        return costs

    def whole_prices(self, value: int) -> np.ndarray:
        """float [layouts of the value, whole layouts]: the price of a transition to each."""
        domain, size = self.domain(value), self.sent_bytes[value]
        return self.transitions_of(value).table(domain, (domain.whole or domain).layouts, size)

    def _add_copies(self, network: Network) -> None:
        for index, shared in self.variables.copies.items():
            layouts = self.domain(index).layouts
            network.add_variable(np.zeros(len(layouts)), name=self.variables.names[shared])
            table = self._transition_table(index, layouts, self._value_times[index])
            network.add_edge(self.variables.values[index], shared, table)

    def _add_work(self, network: Network) -> None:
        for index, variable in self.variables.operations.items():
            network.add_variable(self._work(self.program.operations[index]), name=self.variables.names[variable])

    # ---- tables

    def _transition_table(self, value: int, targets: tuple[Layout, ...], times: int) -> np.ndarray:
        domain, moving, size = self.domain(value), self.transitions_of(value), self.sent_bytes[value]
        key = (domain, targets, size, times, id(moving))
        if key not in self._tables:
            self._tables[key] = times_trips(times, moving.table(domain, targets, size))
        return self._tables[key]

    def _add_operations(self, network: Network) -> None:
        for operation in self.program.operations:
            if operation.results and operation.results[0] in self.generated:
                continue
            if operation.bodies:
                self._add_links(network, self.links[operation.index])
                continue
            if operation.index in self._barriers:
                self._add_barrier(network, operation)
                continue
            own = self.variables.operations.get(operation.index)  # none where the result's layout decides
            if own is not None:
                self._add_results(network, operation, own)
            self._add_operands(network, operation, self.variables.values[operation.results[0]] if own is None else own)

    def _add_links(self, network: Network, links: Links) -> None:
        for link in (*links.enter, *links.inside):
            if not isinstance(link.source, int) or link.source in self.generated:
                continue
            target = self.program.values[link.target]
            # a stack whose leading dimension is split is excluded by its own costs
            targets = layouts_read(link, self.domain(link.target).layouts, len(target.shape))
            table = self._transition_table(link.source, targets, link.times)
            if link.begins and self.domain(link.target).whole is not None:
                made = self.transitions_of(link.source), self.domain(link.source)
                begun = times_trips(link.times, initial_prices(*made, targets, self.sent_bytes[link.source]))
                table = np.minimum(table, begun)
            network.add_edge(self.variables.read(link.source), self.variables.values[target.index], table)

    def _add_barrier(self, network: Network, operation: Operation) -> None:
        """Adds the operands of a barrier: each result has the layout of its own operand."""
        for operand, result in zip(operation.operands, operation.results, strict=True):
            if isinstance(operand, int) and operand not in self.generated:
                table = self._transition_table(operand, self.domain(result).layouts, self.times(operation))
                network.add_edge(self.variables.read(operand), self.variables.values[result], table)

    def _add_operands(self, network: Network, operation: Operation, variable: int) -> None:
        choices, seen = self.choices[operation.index], set()
        for position, operand in enumerate(operation.operands):
            if not isinstance(operand, int) or operand in self.generated or len(self.domain(operand)) == 1:
                continue
            times, domain = self.times(operation), self.domain(operand)
            moving, spread = id(self.transitions_of(operand)), operand in broadcast_values(self.program)
            key = (id(choices), position, domain, self.sent_bytes[operand], times, moving, spread)
            if key not in self._tables:
                targets: Any = tuple(s.operands[position] for s in choices.strategies)
                table = self._transition_table(operand, targets, times)
                sent = self.transitions.sends(domain, targets) if spread else None
                self._tables[key] = table if sent is None else np.where(sent, np.inf, table)
            table = self._tables[key]
            if (operand, id(table)) not in seen:  # a value read twice in one layout has one transition
                seen.add((operand, id(table)))
                network.add_edge(self.source_of(operation, operand), variable, table)

    def source_of(self, operation: Operation, operand: int) -> int:
        """The variable of the layout in which an operation reads an operand."""
        stored = self.choices[operation.index].pointwise and self._is_stored_evenly(operand)
        return self.variables.values[operand] if stored else self.variables.read(operand)

    def _add_results(self, network: Network, operation: Operation, variable: int) -> None:
        choices = self.choices[operation.index]
        for position, result in enumerate(operation.results):
            size, domain, times = self.sent_bytes[result], self.domain(result), self.times(operation)
            moving, rounded = id(self.transitions_of(result)), result in self.deferred.rounded
            key = (id(choices), "result", position, domain, size, times, moving, rounded)
            if key not in self._tables:
                rows = [self._result_row(domain, operation, strategy, position) for strategy in choices.strategies]
                priced = Priced(*np.array([(row.per_byte, row.fixed) for row in rows]).swapaxes(0, 1))
                self._tables[key] = times_trips(times, priced.of(size))
            network.add_edge(variable, self.variables.values[result], self._tables[key])

    def _result_row(self, domain: Domain, operation: Operation, strategy: Strategy, position: int) -> Priced:
        """float [layouts of the domain]: the price from an operation's result to each layout."""
        partial, moving = self.partial(operation, strategy, position), self.transitions_of(operation.results[position])
        if partial.pending:
            row = moving.reductions.row(domain.whole or domain, partial)
            none = np.zeros(len(domain) - len(row.fixed))
            per_byte = np.concatenate([row.per_byte, none + np.inf])
            waits = partial.island and operation.results[position] not in self.deferred.rounded
            if waits and partial.kept in domain.position:
                per_byte[domain.position[partial.kept]] = 0.0
            return Priced(per_byte, np.concatenate([row.fixed, none]))
        priced, place = moving.priced(domain), domain.position[partial.layout]
        return Priced(priced.per_byte[place], priced.fixed[place])

    def partial(self, operation: Operation, strategy: Strategy, position: int) -> Partial:
        """The state of an operation's result directly after the operation."""
        island = self.islands and may_be_island(operation, strategy)
        tensor = self.program.values[operation.results[position]]
        sum_dtype = self.reduced_in(operation, strategy, position, self.reduce_dtype)
        width = reduced_width(tensor, self.sent_bytes[tensor.index], sum_dtype)
        among = len(self.space.mesh.names)
        pending = order_of_sum(operation, strategy, strategy.pending[position], among)
        scattered = scatters(operation, strategy, pending, among)
        return Partial(strategy.results[position], pending, island, width, scattered)

    def reduced_in(self, operation: Operation, strategy: Strategy, position: int, wanted: Any) -> Any:
        """The element type of an operation's reductions, with ``wanted`` as the ``reduce_dtype``."""
        tensor = self.program.values[operation.results[position]]
        if compared_as_integers(self.program, operation, strategy):
            return compared_dtype(tensor.dtype)
        island = self.islands and may_be_island(operation, strategy)
        return reduction_dtype(operation, tensor, wanted) if island else tensor.dtype

    def _add_outputs(self, network: Network) -> None:
        for number, target in self.program.replaced.items():
            output = self.program.outputs[number]
            if not isinstance(output, int) or output in self.generated or output == target:
                continue
            if len(self.domain(output)) > 1:
                table = self._transition_table(output, self.domain(target).layouts, 1)
                network.add_edge(self.variables.read(output), self.variables.values[target], table)

    def variables_of(self, value: int) -> tuple[int | None, int | None]:
        """The variables of a value and of its shared copy in the network, None for a missing one."""
        return self.variables.values.get(value), self.variables.copies.get(value)

    def variable_of_operation(self, operation: int) -> int | None:
        """The variable of an operation in the network, None if its result's layout decides its split."""
        return self.variables.operations.get(operation)

    def encode(self, assignment: Assignment) -> np.ndarray:
        """int [variables]: the choices of the network for layouts and strategies."""
        variables = self.variables
        found = np.zeros(len(variables.names), np.int64)
        for layouts, of in ((assignment.values, variables.values), (assignment.copies, variables.copies)):
            for value, variable in of.items():
                found[variable] = self.domain(value).position[layouts[value]]
        for index, variable in variables.operations.items():
            found[variable] = self.choices[index].strategies.index(assignment.strategies[index])
        return found

    def decode(self, choices: np.ndarray) -> Assignment:
        """The layouts and strategies of a solution of the network."""
        variables = self.variables
        values = {v: self.domain(v).layouts[choices[i]] for v, i in variables.values.items()}
        copies = {v: self.domain(v).layouts[choices[i]] for v, i in variables.copies.items()}
        strategies = {}
        for operation in self.program.operations:
            options, variable = self.choices.get(operation.index), variables.operations.get(operation.index)
            if operation.index in self._barriers:
                strategies[operation.index] = barrier_strategy(operation, values, self.space.mesh)
            elif options is not None and (variable is not None or operation.results[0] not in self.generated):
                variable = variables.values[operation.results[0]] if variable is None else variable
                strategies[operation.index] = options.strategies[choices[variable]]
        return Assignment(values, copies, strategies, self.generated)
