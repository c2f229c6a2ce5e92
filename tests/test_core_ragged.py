"""Products of rows in groups: which splits XLA runs as the rule says, and that these are the ones that plans use."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardplan import rules
from shardplan.audit import measure
from shardplan.partitioner import usable_splits
from shardplan.target import gpu_mesh

ROWS, INNER, OUTER, GROUPS = 64, 32, 48, 8
Numbers = jax.lax.RaggedDotDimensionNumbers
OF_MATRICES = Numbers((((0,), (0,)), ((), ())), [0], [])
OF_ROWS = Numbers((((1,), (2,)), ((), ())), [0], [0])


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SIZES = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
FORMS = {
    "product": (jax.lax.ragged_dot, (shaped(ROWS, INNER), shaped(GROUPS, INNER, OUTER), SIZES), {"j", "k"}),
    "gradient of the matrices": (
        lambda x, y, sizes: jax.lax.ragged_dot_general(x, y, sizes, OF_MATRICES),
        (shaped(ROWS, INNER), shaped(ROWS, OUTER), SIZES),
        {"i", "j", "g"},
    ),
    "gradient of the rows": (
        lambda y, w, sizes: jax.lax.ragged_dot_general(y, w, sizes, OF_ROWS),
        (shaped(ROWS, OUTER), shaped(GROUPS, INNER, OUTER), SIZES),
        {"j", "k"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_the_matrices_of_groups_are_not_split(form: str):
    function, operands, expected = FORMS[form]
    rule = rules.rule_of(function, *operands)
    assert {split.index for split in usable_splits(rule, 8)} == expected
    assert {split.index for split in rule.splits(8)} == {"i", "j", "k", "g"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("form", FORMS)
def test_xla_sends_what_the_rule_says_for_these_alone(form: str):
    function, operands, expected = FORMS[form]
    rule, mesh = rules.rule_of(function, *operands), gpu_mesh("h100", (8,), ("x",))
    result = jax.eval_shape(function, *operands)

    def placed(slot, rank: int) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*["x" if dim == slot.dim else None for dim in range(rank)]))

    for split in rule.splits(8):
        before = tuple(placed(slot, len(o.shape)) for slot, o in zip(split.operands, operands, strict=True))
        after = placed(split.results[0], len(result.shape))
        sent = measure(jax.jit(function, in_shardings=before, out_shardings=after).lower(*operands)).communication_bytes
        reduced = 2 * 7 / 8 * result.size * 4 if split.results[0].reducer else 0
        assert (sent == reduced) == (split.index in expected), split.index
