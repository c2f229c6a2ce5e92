"""Predicted peaks of convolutions: copies of images and filters, and what poolings scatter into."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.accumulation import accumulations
from shardplan.memory.bringing import Sending
from shardplan.memory.convolutions import (
    copied_with_neighbours,
    forward_convolutions,
    neighbour_bytes,
    reordered_in,
    reordered_inputs,
    spread_operands,
)
from shardplan.memory.copies import convolution_copies
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes
from shardplan.memory.order import order_of
from shardplan.memory.pooled import rectifiers_of_poolings
from shardplan.memory.poolings import zeros_of_poolings
from shardplan.memory.recomputing import kernels_of
from shardplan.memory.turning import turn_operands
from shardplan.tracing import trace_program

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def _peak_on_one(step, *args):
    return shardplan.plan(step, jax.sharding.AbstractMesh((1,), ("x",)), *args).peak_bytes - WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("shape", "numbers", "copied"),
    [
        ((3, 3, 64, 64), ("NHWC", "HWIO", "NHWC"), True),
        ((64, 3, 3, 64), ("NHWC", "OHWI", "NHWC"), False),
        ((1, 1, 1, 64), ("NHWC", "OHWI", "NHWC"), False),
        ((64, 64, 3, 3, 3), ("NCDHW", "OIDHW", "NCDHW"), False),
        ((64, 3, 3, 3, 64), ("NCDHW", "ODHWI", "NCDHW"), True),
    ],
)
def test_filters_in_another_order_than_cudnn_reads_are_copied_for_the_whole_step(shape, numbers, copied):
    sizes = {"O": 64, "I": shape[numbers[1].index("I")], "N": 2, "C": shape[numbers[1].index("I")]}
    image = jax.ShapeDtypeStruct(tuple(sizes.get(dim, 8) for dim in numbers[0]), jnp.float32)
    filters = jax.ShapeDtypeStruct(shape, jnp.float32)

    def step(x, w):
        return jax.lax.conv_general_dilated(x * 2, w, (1,) * (len(shape) - 2), "SAME", None, None, numbers)

    program = trace_program(step, (image, filters), {})
    assert (1 in reordered_inputs(program, program.operations)) == copied


def test_filters_are_transposed_once_and_read_in_reverse_from_the_same_copy():
    filters = jax.ShapeDtypeStruct((3, 3, 512, 512), jnp.float32)
    image = jax.ShapeDtypeStruct((1, 2, 2, 512), jnp.float32)

    def step(x, w):
        def loss(x):
            return jnp.sum(
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC")) ** 2
            )

        return jax.grad(loss)(x)

    size = 4 * 9 * 512 * 512
    assert _peak_on_one(step, image, filters) == pytest.approx(2 * size, rel=0.5)


@pytest.mark.parametrize("rectified", [1, 2])
def test_a_pooling_gradient_scatters_into_the_zeros_of_a_rectifier(rectified):
    def loss(x):
        for _ in range(rectified):
            x = jax.nn.relu(2 * x)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID").sum()

    program = trace_program(jax.grad(loss), (jax.ShapeDtypeStruct((4, 16, 16), jnp.float32),), {})
    ((gradient, (rectifier, *others)),) = rectifiers_of_poolings(program).items()
    assert rectifier.primitive.name == "max" and rectifier.index < gradient
    assert len(others) == rectified


def test_the_zeros_that_a_pooling_gradient_scatters_into_are_copied_where_others_read_them_too():
    def loss(x, w):
        for _ in range(2):
            x = jax.nn.relu(x @ w)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID").sum()

    image, square = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 512, 512), (512, 512)))
    schedule = shardplan.plan(jax.grad(loss, (0, 1)), 1, image, square).schedule
    kernels = kernels_of(schedule.problem)
    order, sending = hiding_order(schedule, kernels)
    [gradient] = rectifiers_of_poolings(schedule.program)
    assert order.index(sending.filling[gradient]) <= order.index(gradient)
    for filling, copies in (({}, 1), ({gradient: order[0]}, 2)):
        lifetimes = Lifetimes(schedule.problem, order, kernels, Sending(filling=filling))
        assert len(list(zeros_of_poolings(lifetimes, schedule.program))) == copies


def _convolved(images, filters):
    def loss(filters):
        x = images
        for _ in range(3):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, filters, (1, 1), "SAME"))
        return x.sum()

    return jax.grad(loss)(filters)


def test_convolutions_split_along_their_windows_read_copies_with_rows_of_neighbours_and_store_no_rectified_image():
    shapes = jax.ShapeDtypeStruct((1, 8, 512, 256), jnp.float32), jax.ShapeDtypeStruct((8, 8, 3, 3), jnp.float32)
    plan = shardplan.plan(_convolved, jax.sharding.AbstractMesh((4,), ("x",)), *shapes)
    problem = plan.schedule.problem
    strategies = plan.schedule.assignment.strategies
    copied = copied_with_neighbours(problem, strategies)
    sizes = [neighbour_bytes(problem, problem.program.operations[index], strategies[index]) for index, _ in copied]
    assert min(sizes) == 4 * 8 * (128 + 2) * 256 and len(sizes) > 1
    kernels, program = kernels_of(problem, copied), problem.program
    held = Lifetimes(problem, range(len(program.operations)), kernels).held
    assert "max" not in {o.primitive.name for o in program.operations for result in o.results if result in held}


def test_a_transposed_convolution_spreads_its_image_in_a_copy():
    def grown(images, filters):
        return jax.lax.conv_general_dilated(images * 2, filters, (1, 1), [(1, 1), (1, 1)], lhs_dilation=(2, 2))

    shapes = jax.ShapeDtypeStruct((2, 8, 32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 8, 2, 2), jnp.float32)
    # the image, the copy with three zeros for each element, and the result: the image times two is stored nowhere
    block, filters = 4 * 2 * 8 * 32 * 32, 4 * 8 * 8 * 2 * 2
    assert _peak_on_one(grown, *shapes) + WORKSPACE_BYTES == pytest.approx((1 + 4 + 4) * block + filters, rel=0.05)


def test_the_gradient_of_a_transposed_convolutions_filters_reads_transposed_copies():
    def grow(images, filters):
        grown = jax.lax.conv_general_dilated(images, filters, (1, 1), [(1, 1), (1, 1)], lhs_dilation=(2, 2))
        return jnp.sum(grown**2)

    shapes = jax.ShapeDtypeStruct((2, 8, 32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 8, 2, 2), jnp.float32)
    program = trace_program(jax.grad(grow, argnums=1), shapes, {})
    grown, gradient = (o.index for o in program.operations if o.primitive.name == "conv_general_dilated")
    turned = {(gradient, 0): 1.0, (gradient, 1): 1.0}  # both are read with the batch as their channels
    assert spread_operands(program, program.operations) == {(grown, 0): (65 / 32) ** 2} | turned
    assert spread_operands(program, program.operations, {(gradient, 0)}) == {
        (grown, 0): (65 / 32) ** 2,
        (gradient, 0): 4.0,
    }


def test_filters_of_volumes_keep_their_place_and_read_the_copy_with_zeros_once_more():
    """Their gradient reads a part of the gradient of what was put together behind them, transposed. That what it reads
    is nothing but transposed was said before: 1.12 of what was predicted is compiled of a net of such."""

    def grow(images, filters, others, mixing):
        grown = jax.lax.conv_general_dilated(images, filters, (1, 1, 1), [(1, 1)] * 3, lhs_dilation=(2, 2, 2))
        both = jnp.concatenate([others, grown], axis=1)
        return jnp.sum(jax.lax.conv_general_dilated(both, mixing, (1, 1, 1), [(1, 1)] * 3) ** 2)

    shapes = (2, 8, 16, 16, 16), (8, 8, 2, 2, 2), (2, 8, 32, 32, 32), (8, 16, 3, 3, 3)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = trace_program(jax.grad(grow, argnums=1), args, {})
    grown, gradient = (o.index for o in program.operations if o.params.get("lhs_dilation") == (2, 2, 2))
    times = (33 / 16) ** 3
    assert spread_operands(program, program.operations) == {(grown, 0): times, (gradient, 0): times, (gradient, 1): 1.0}


def test_the_gradients_of_filters_larger_than_what_they_make_are_read_from_copies():
    numbers = ("NHWC", "HWIO", "NHWC")

    def step(images, filters):
        made = jax.lax.conv_general_dilated(images, filters, (2, 2), "VALID", dimension_numbers=numbers)
        return jnp.sum(made**2)

    shapes = jax.ShapeDtypeStruct((4, 20, 20, 8), jnp.float32), jax.ShapeDtypeStruct((9, 9, 8, 8), jnp.float32)
    program = trace_program(jax.grad(step, argnums=(0, 1)), shapes, {})
    _, of_filters, of_images = (o.index for o in program.operations if o.primitive.name == "conv_general_dilated")
    spread = (11 / 6) ** 2  # the gradient of 6 x 6 images, of which every second row is zero
    assert spread_operands(program, program.operations) == {
        (of_filters, 0): (19 / 20) ** 2,
        (of_filters, 1): spread,
        (of_images, 1): (30 / 9) ** 2,
        (of_images, 0): spread,
    }


def test_what_copies_operands_of_convolutions_stands_in_the_order_by_itself():
    def grow(images, filters):
        grown = jax.lax.conv_general_dilated(jnp.tanh(images), filters, (1, 1), [(1, 1), (1, 1)], lhs_dilation=(2, 2))
        return jnp.sum(jnp.tanh(grown))

    shapes = jax.ShapeDtypeStruct((2, 8, 32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 8, 2, 2), jnp.float32)
    schedule = shardplan.plan(jax.grad(grow, argnums=1), 1, *shapes).schedule
    kernels = kernels_of(schedule.problem)
    grown, gradient = (o.index for o in schedule.program.operations if o.primitive.name == "conv_general_dilated")
    graph = Graph(schedule, kernels, [], [])
    assert graph.needs[gradient] == {grown}
    turn_operands(graph, kernels)
    assert graph.needs[gradient] <= graph.further and len(graph.needs[gradient]) == 2 and graph.needs[grown]
    assert {need for node in graph.needs[gradient] for need in graph.needs[node]} == {grown}
    order, _ = hiding_order(schedule, kernels)
    assert sorted(order) == list(range(len(order)))


def test_a_forward_convolution_adds_a_bias_and_what_is_in_memory():
    numbers = ("NHWC", "HWIO", "NHWC")

    def step(x, y, w, bias):
        first, second = (
            jax.lax.conv_general_dilated(image, w, (1, 1), "SAME", dimension_numbers=numbers) for image in (x, y)
        )
        return jnp.tanh(first + bias + second)

    image, bias = jax.ShapeDtypeStruct((4, 16, 16, 8), "float32"), jax.ShapeDtypeStruct((8,), "float32")
    schedule = shardplan.plan(step, 1, image, image, jax.ShapeDtypeStruct((3, 3, 8, 8), "float32"), bias).schedule
    made = {o.results[0]: o for o in schedule.program.operations}
    [found] = accumulations(schedule).values()
    first, second = (o.index for o in made.values() if o.primitive.name == "conv_general_dilated")
    assert (found.product, made[found.onto].index, found.in_place) == (first, second, False)
    assert [schedule.program.operations[index].primitive.name for index in found.between] == ["add"]


@pytest.mark.parametrize(
    ("filters", "dilation", "change", "forward"),
    [
        ((3, 3), 1, jnp.tanh, False),
        ((1, 1), 1, jnp.tanh, True),
        ((3, 3), 2, jnp.tanh, True),
        ((3, 3), 1, lambda w: w / jnp.sum(w), True),
        ((3, 3), 1, lambda w: jnp.tanh(w * 2), False),
    ],
)
def test_gradients_of_images_are_forward_convolutions_where_cudnn_takes_no_reverse(filters, dilation, change, forward):
    def step(x, w):
        made = jax.lax.conv_general_dilated(x, change(w), (1, 1), "SAME", rhs_dilation=(dilation, dilation))
        return jnp.sum(made**2)

    shapes = jax.ShapeDtypeStruct((2, 8, 16, 16), "float32"), jax.ShapeDtypeStruct((8, 8, *filters), "float32")
    program = trace_program(jax.grad(step), shapes, {})
    made, of_images = (o.index for o in program.operations if o.primitive.name == "conv_general_dilated")
    assert forward_convolutions(program) == ({made, of_images} if forward else {made})


def test_an_operand_is_copied_where_the_order_says_or_by_the_kernel_that_makes_it():
    def step(image, filters):
        grown = jax.lax.conv_general_dilated(image, filters, (1, 1), [(1, 1), (1, 1)], lhs_dilation=(2, 2))
        return jnp.sum(jnp.tanh(grown))

    shapes = jax.ShapeDtypeStruct((2, 8, 32, 32), "float32"), jax.ShapeDtypeStruct((8, 8, 2, 2), "float32")
    schedule = shardplan.plan(jax.grad(step, argnums=(0, 1)), 1, *shapes).schedule
    kernels = kernels_of(schedule.problem)
    order, sending = hiding_order(schedule, kernels)
    turned = spread_operands(schedule.program, schedule.program.operations)
    gradient = next(o for o in schedule.program.operations if turned.get((o.index, 1)) == 1)
    maker = next(o.index for o in schedule.program.operations if gradient.operands[1] in o.results)
    assert sending.beside[gradient.index, 1] == maker
    early = Sending(beside={(gradient.index, 0): order[1]})
    for known, first in ((Sending(), order.index(gradient.index)), (early, 1)):
        spread = Lifetimes(schedule.problem, order, kernels, known).spread
        assert [start for reader, place, _, start, _ in spread if (reader, place) == (gradient, 0)] == [first]


def test_what_two_convolutions_read_from_one_copy_with_zeros_is_computed_for_that_copy_alone():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64, 64, 64), (3, 3, 64, 64), (3, 3, 64, 128))]

    def loss(x, first, second):  # the second's image is padded at one end, for it and for its filters' gradient
        image = jax.nn.gelu(
            jax.lax.conv_general_dilated(x, first, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
        )
        return jnp.sum(
            jax.lax.conv_general_dilated(image, second, (2, 2), "SAME", None, None, ("NHWC", "HWIO", "NHWC")) ** 2
        )

    program = shardplan.plan(jax.grad(loss, argnums=(1, 2)), 1, *shapes).schedule.problem
    makers = {value: o.primitive.name for o in program.program.operations for value in o.results}
    assert "tanh" not in [makers[value] for value in kernels_of(program).stored]


@pytest.mark.parametrize(
    ("unit", "applied"), [(jax.nn.relu, True), (jax.nn.gelu, False), (lambda x: jnp.maximum(x, jnp.tanh(x)), False)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_rectifier_is_applied_by_the_convolution(unit, applied, biased):
    def step(image, filters, bias):
        found = jax.lax.conv_general_dilated(image, filters, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
        return jnp.mean(unit(found + bias if biased else found))

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 16, 16, 32), (3, 3, 32, 32), (32,))]
    program = (schedule := shardplan.plan(step, 1, *shapes).schedule).program
    ends = [program.operations[index].primitive.name for index in accumulations(schedule)]
    assert ends == (["max"] if applied else ["add"] if biased else [])


@pytest.mark.parametrize(
    ("shared", "needed", "together"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_copies_with_zeros_as_large_that_read_one_vector_are_made_by_one_kernel(shared, needed, together):
    """As of a generator that runs twice, for what it is trained with and for what its judge is."""

    def grown(image, vector, filters, bias):
        image = jax.nn.relu(image + vector)
        return jax.lax.conv_transpose(image, filters, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias

    def step(x, y, a, b, filters, bias):
        first = grown(x @ a, bias, filters, bias)
        y = y + jnp.sum(first) if needed else y
        return first, grown(y @ b, bias if shared else 2 * jnp.sum(y, axis=(0, 1, 2)), filters, bias)

    image, square = jax.ShapeDtypeStruct((64, 16, 16, 32), "float32"), jax.ShapeDtypeStruct((32, 32), "float32")
    filters, bias = jax.ShapeDtypeStruct((4, 4, 32, 32), "float32"), jax.ShapeDtypeStruct((32,), "float32")
    schedule = shardplan.plan(step, 1, image, image, square, square, filters, bias).schedule
    kernels = kernels_of(schedule.problem)
    graph = Graph(schedule, kernels, [], [])
    turn_operands(graph, kernels)
    assert len(graph.in_order()) == len(graph.needs)
    first, second = [node for (_, position), node in graph.beside.items() if not position]
    assert (first == second) == together


def test_a_copy_with_zeros_is_made_before_a_convolution_that_adds_a_bias():
    def step(x, w, filters, bias):
        image = jax.nn.relu(x @ w)
        grown = jax.lax.conv_transpose(image, filters, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(grown + bias)

    shapes = (64, 16, 16, 32), (32, 32), (4, 4, 32, 32), (32,)
    schedule = shardplan.plan(step, 1, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).schedule
    kernels = kernels_of(schedule.problem)
    order, sending = hiding_order(schedule, kernels)
    [(reader, _, _, first, last)] = Lifetimes(schedule.problem, order, kernels, sending).spread
    assert (reader.index, 0) in sending.beside and first == last


@pytest.mark.parametrize("carried", [False, True])
def test_filters_that_stay_as_they_are_while_a_loop_runs_are_transposed_for_all_of_it(carried):
    """XLA moves the copy in front of the loop: it is there beside the filters until that ends."""

    def step(filters, images):
        def body(state, image):
            total, own = state
            dimensions = ("NHWC", "HWIO", "NHWC")
            made = jax.lax.conv_general_dilated(image, own, (1, 1), "SAME", dimension_numbers=dimensions)
            return (total + jnp.sum(jnp.tanh(made)), own * 0.5 if carried else own), None

        return jax.lax.scan(body, (0.0, filters), images)[0][0]

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 3, 256, 256), (4, 2, 8, 8, 256))]
    schedule = shardplan.plan(step, 1, *shapes).schedule
    problem, program = schedule.problem, schedule.program
    found = reordered_in(problem, program.operations, ())
    assert (program.inputs[0] in found) != carried
    lifetimes = Lifetimes(problem, order_of(program))
    held = [one for one in convolution_copies(lifetimes, schedule) if one.value == program.inputs[0]]
    [loop] = [o for o in program.operations if o.bodies]
    assert [one.size for one in held] == ([] if carried else [4 * 9 * 256 * 256])
    assert all(one.lifetime.end >= lifetimes.place[loop.index] for one in held)


@pytest.mark.parametrize(("stored", "turned"), [(("x", None), True), ((None, "x"), False)])
def test_a_filter_gathered_along_another_dimension_than_lies_outermost_is_turned(stored, turned):
    def step(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    w, x = jax.ShapeDtypeStruct((1, 1, 512, 1024), "float32"), jax.ShapeDtypeStruct((64, 8, 8, 512), "float32")
    pins = {"0": jax.P(None, None, *stored), "1": jax.P("x")}
    schedule = shardplan.plan(step, MESH, w, x, pins=pins).schedule
    [operation] = schedule.program.operations
    assert [step.kind for step in schedule.route(operation.operands[1], ((), (), (), ())).steps] == ["all-gather"]
    lifetimes = Lifetimes(schedule.problem, [0])
    assert [held.size for held in convolution_copies(lifetimes, schedule)] == [4.0 * w.size] * turned


@pytest.mark.parametrize(("strides", "times"), [(2, [67 / 64]), (1, [])])
def test_filters_in_reverse_are_read_with_strides_by_a_forward_convolution(strides, times):
    """The gradient of a transposed convolution's image: cuDNN pads both ends alike, so that XLA writes the zeros."""
    numbers = ("NWC", "WIO", "NWC")

    def step(image, filters):
        reverse = jax.lax.rev(filters, (0,))
        return jax.lax.conv_general_dilated(image, reverse, (strides,), [(1, 2)], dimension_numbers=numbers)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 64, 4), (5, 4, 4))]
    program = trace_program(step, shapes, {})
    assert [*spread_operands(program, program.operations).values()] == times
