"""Sums that are kept running: products that are added up one after another, as they are made.

The gradient of a weight that many operations read (a recurrent net's, timestep by timestep; a layer's that is applied
again and again) is a sum of products. XLA fuses the additions into one kernel behind the last product, or adds up every
other one in place, and holds the rest until then: twenty timesteps hold up to twenty gradients. Where memory is short
each sum of them stands behind a barrier, which no fusion sees through: one sum is held, and the product that it takes
in next. A product that is merged with others, and so adds itself to nothing, would still be computed long before the
sum is there (`shardplan.waiting`). A sum is read and written once more for each product, so that a step which fits does
without.

Such a sum lies in memory as its products do. XLA would have all of them lie as a collective that scatters the last one
wants them, which may be neither that order nor its reverse: each product were copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardplan.early import ADDITIONS, MOVING, reduced_before_added
from shardplan.memory.convolutions import CONVOLUTION
from shardplan.memory.products import is_multiplied
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Constant
from shardplan.schedule import Schedule
from shardplan.steps import Step

_FEWEST = 4
"""Products that are added up, for more than one to wait: of three (of queries, keys and values) one does."""

_LEAST_BYTES = 1 << 20
"""Of a sum, split over all devices, for its memory to be worth a kernel."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of products: those that are ``running``, since one further addition alone reads them, which adds more
    products to them; how their products, and those of the last sums, lie in memory: dimensions from the one whose
    elements lie furthest apart to the one whose elements lie next to each other; and per product that a running sum
    takes in, by its operation's index, that sum, which is there ``before``."""

    running: frozenset[int]
    lying: dict[int, tuple[int, ...]] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)


def behind_barriers(schedule: Schedule) -> frozenset[int]:
    """The values that the applied program stores behind a barrier, in the layout that the plan gives them."""
    early = reduced_before_added(schedule) if schedule.problem.islands else frozenset[int]()
    return early | running_sums(schedule)


def running_sums(schedule: Schedule) -> frozenset[int]:
    """The sums behind barriers that a schedule keeps running: none, where it leaves them to XLA."""
    return sums_of_products(schedule.problem).running if schedule.running else frozenset()


def lying_until_scattered(schedule: Schedule, value: int, steps: Iterable[Step]) -> tuple[int, ...] | None:
    """The order in which the dimensions of a sum that waits lie in memory until these steps; None where XLA decides."""
    scattered = schedule.running and any(step.kind == "reduce-scatter" for step in steps)
    return sums_of_products(schedule.problem).lying.get(value) if scattered else None


@once
def sums_of_products(problem: Problem) -> Sums:
    """The sums of products of a program that are worth running."""
    program = problem.program
    least_bytes = _LEAST_BYTES * problem.space.mesh.device_count
    reads = Counter(o for operation in program.operations for o in operation.operands if isinstance(o, int))
    reads.update(o for region in program.regions for o in region.outputs if isinstance(o, int))
    products = dict[int, int]()  # how many each sum of them has
    inside = dict[int, set[int]]()  # the sums that each is made of
    lying = dict[int, tuple[int, ...]]()
    steps = dict[int, dict[int, int]]()  # per addition's result, the products that it adds to a sum, with that
    running, last, before = set[int](), set[int](), dict[int, int]()
    for operation in program.operations:
        if operation.primitive.name == CONVOLUTION or is_multiplied(program, operation):
            products[operation.results[0]] = 1
            lying[operation.results[0]] = tuple(range(len(program.values[operation.results[0]].shape)))
        elif operation.primitive.name in ADDITIONS:
            added = [read for operand in operation.operands if (read := _added(problem, operand, reads, products))]
            [result] = operation.results
            if added:
                products[result] = sum(products[value] for value, _ in added)
                inside[result] = {value for value, _ in added if products[value] > 1}
                single = [program.makers[value] for value, _ in added if products[value] == 1]
                taken = [maker.index for maker in single if maker.primitive.name not in ADDITIONS]
                steps[result] = {index: value for index in taken for value in inside[result]}
                orders = {tuple(turned.index(d) for d in lying[v]) for v, turned in added if turned and v in lying}
                if len(orders) == 1:
                    lying[result] = orders.pop()
            if products.get(result, 0) >= _FEWEST and program.values[result].total_bytes >= least_bytes:
                last.add(result)
                stack = [result]
                while stack:
                    before |= steps[stack[-1]]
                    further = inside[stack.pop()] - running
                    running |= further
                    stack += further
    lying = {value: order for value, order in lying.items() if value in running | last}
    return Sums(frozenset(running), lying, before)


def _added(
    problem: Problem, operand: int | Constant, reads: Counter[int], products: dict[int, int]
) -> tuple[int, tuple[int, ...]] | None:
    """The product, or the sum of products, that an operand is made of, and where each of the operand's dimensions is
    among its own, or nothing where that is another shape; None where it is made otherwise, or read elsewhere too."""
    makers = problem.program.makers
    turned = None if isinstance(operand, Constant) else tuple(range(len(problem.program.values[operand].shape)))
    while isinstance(operand, int) and reads[operand] == 1:
        if operand in products:
            return operand, turned or ()
        maker = makers.get(operand)
        if maker is None or maker.primitive.name not in MOVING:
            break
        if maker.primitive.name == "transpose" and turned:
            turned = tuple(maker.params["permutation"][dim] for dim in turned)
        elif maker.primitive.name != "convert_element_type":
            turned = None
        operand = maker.operands[0]
    return None
