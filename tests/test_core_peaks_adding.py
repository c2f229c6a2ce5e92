"""Predicted peaks: products that add themselves to what is there, gradients of one weight and biases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.memory.accumulation import accumulations
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes
from shardplan.memory.recomputing import adding_products, kernels_in, kernels_of


def _square(size):
    return jax.ShapeDtypeStruct((size, size), jnp.float32)


def test_partial_gradients_of_one_weight_are_added_up_in_place():
    n, steps = 512, 6

    def step(w, xs, ys):
        return sum(x.T @ y for x, y in zip(xs, ys, strict=True)) @ w

    many = [_square(n)] * steps
    plan = shardplan.plan(step, 1, _square(n), many, many)
    peak = plan.peak_bytes - WORKSPACE_BYTES
    # arguments, the result, the sum of all products and one more buffer at most
    assert peak <= (1 + 2 * steps + 1 + 2) * 4 * n * n


def test_of_a_weights_gradients_added_up_one_after_another_every_other_addition_is_part_of_a_product():
    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    pins, mesh = {"0": jax.P(), "1": jax.P("x", None)}, jax.sharding.AbstractMesh((2,), ("x",))
    weight, x = _square(512), jax.ShapeDtypeStruct((1024, 512), "float32")
    schedule = shardplan.plan(jax.grad(loss), mesh, weight, x, pins=pins).schedule
    operations = schedule.program.operations
    kernels = adding_products(schedule, kernels_of(schedule.problem))
    shapes = [value.shape for value in schedule.program.values]
    sums = [o for o in operations if o.primitive.name == "add_any" and shapes[o.results[0]] == weight.shape]
    # the first sum, of two products, is the first product's; then a kernel adds one, and a product itself to the result
    assert [o.index in kernels.adding for o in sums[:4]] == [True, False, True, False]
    first, second = kernels.adding.values()
    order = hiding_order(schedule, kernels)[0]
    lifetimes = Lifetimes(schedule.problem, order, kernels)
    makers = {result: operation for operation in operations for result in operation.results}
    assert second.onto == sums[1].results[0] and makers[first.onto].index > first.product
    for found in (first, second):  # what is added to is there before the product starts
        assert lifetimes.place[makers[found.onto].index] < lifetimes.place[found.product]
        assert operations[found.product].results[0] not in lifetimes.held
        assert lifetimes.held[found.onto].end == lifetimes.place[found.addition] - 1
    # as compiled: behind a product, from which its result is taken first, the kernel before it can be placed at once
    data = [o for o in operations if o.primitive.name == "dot_general" and shapes[o.results[0]] == x.shape][6:]
    assert order.index(makers[first.onto].index) < order.index(data[2].index)


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        (lambda product: product.astype("float32"), True),
        (lambda product: product.T.astype("float32"), True),
        (lambda product: product.astype("float32").T, False),
        (lambda product: product.astype("float32") * 0.5, False),
        (lambda product: product.reshape(4, 16, 64).astype("float32").reshape(64, 64), False),
    ],
)
def test_a_product_that_is_widened_is_added_as_float32(changed, taken):
    def step(total, x, y):
        return total + changed(x @ y)

    narrow = jax.ShapeDtypeStruct((64, 64), "bfloat16")
    schedule = shardplan.plan(step, 1, _square(64), narrow, narrow).schedule
    addition = next(o.index for o in schedule.program.operations if o.primitive.name == "add")
    assert (accumulations(schedule).keys() == {addition}) == taken  # as compiled: beta = 1, into float32


def test_one_number_that_is_added_to_a_product_is_no_bias():
    def step(x):
        return jnp.sum(x) + x @ x  # the sum is added as it is, without being repeated

    assert not accumulations(shardplan.plan(step, 1, _square(64)).schedule)


def test_a_product_of_several_heads_is_not_added_as_float32():
    def step(total, x, y):
        return total + jnp.einsum("td,thk->dhk", x, y).astype("float32")

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 32), (64, 4, 16))]
    plan = shardplan.plan(step, 1, jax.ShapeDtypeStruct((32, 4, 16), "float32"), *shapes)
    assert not accumulations(plan.schedule)


@pytest.mark.parametrize(("shape", "taken"), [((64,), True), ((16, 64), False)])
def test_a_bias_of_rows_in_groups_is_added_by_the_product_too(shape, taken):
    def step(x, w, b):
        return jnp.tanh(x @ w + b)

    rows = jax.ShapeDtypeStruct((4, 16, 64), "float32")
    schedule = shardplan.plan(step, 1, rows, _square(64), jax.ShapeDtypeStruct(shape, "float32")).schedule
    assert bool(accumulations(schedule)) == taken  # as compiled: one number for each column alone is a bias


def test_a_unit_of_which_a_part_is_computed_twice_is_no_part_of_its_product():
    def unit(x, w):
        return jax.nn.gelu(x @ w)

    def step(x, w, v):
        number = (x @ w) + 0.044715 * (x @ w) ** 3
        return unit(x, w) @ v, jnp.tanh(np.sqrt(2 / np.pi).astype("float32") * number)

    square = jax.ShapeDtypeStruct((64, 64), "float32")
    for fn, units in ((lambda x, w, v: unit(x, w) @ v, 1), (step, 0)):
        schedule = shardplan.plan(fn, 1, square, square, square).schedule
        assert len(adding_products(schedule, kernels_in(schedule)).adding) == units
