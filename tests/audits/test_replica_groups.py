"""Replica groups in their three spellings, and the way back from groups to mesh axes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.compiled.hlo.replica_groups import mesh_axes, permute_axes, replica_groups

SPELLINGS = [
    # text, devices, groups
    ("{{0,1},{2,3}}", 4, ((0, 1), (2, 3))),
    ("{{0, 1}, {2, 3}}", 4, ((0, 1), (2, 3))),
    ("{{3},{1}}", 4, ((3,), (1,))),
    ("{}", 3, ((0, 1, 2),)),
    ("{{}}", 3, ((),)),
    ("[2,4]<=[8]", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("[2,4]<=[4,2]T(1,0)", 8, ((0, 2, 4, 6), (1, 3, 5, 7))),
    ("[4,2]<=[2,2,2]T(0,2,1)", 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("[1,8]<=[8]", 8, ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", 8, ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['a'=2,'b'=2] {'b','a'}", 4, ((0, 1, 2, 3),)),
    ("mesh['a'=8] {'a':(1)2}", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("mesh['a'=8] {'a':(2)2}", 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("mesh['a'=8] {'a':(2)4}", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 8, ((0, 2, 4, 6), (1, 3, 5, 7))),
    ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", 4, ((0, 2), (1, 3))),
    ("mesh[a=2,b=2] {a}", 4, ((0, 2), (1, 3))),
]


@pytest.mark.parametrize(("text", "devices", "groups"), SPELLINGS)
def test_spellings(text, devices, groups):
    assert sorted(replica_groups(text, devices)) == sorted(groups)


def test_an_unknown_spelling_is_an_error():
    with pytest.raises(ValueError, match="`some<=groups`"):
        replica_groups("some<=groups", 8)


@st.composite
def meshes(draw):
    """A mesh of up to 3 axes, and some of its axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh_shape = {f"axis_{i}": size for i, size in enumerate(sizes)}
    return mesh_shape, draw(st.sets(st.sampled_from(list(mesh_shape))))


@given(meshes())
def test_groups_along_axes_lead_back_to_them_in_every_spelling(drawn):
    mesh_shape, chosen = drawn
    sizes, names = list(mesh_shape.values()), list(mesh_shape)
    kept = [i for i, name in enumerate(names) if name in chosen]
    order = [i for i in range(len(names)) if i not in kept] + kept
    group_size = math.prod(sizes[i] for i in kept)
    count = math.prod(sizes)
    expected = np.arange(count).reshape(sizes).transpose(order).reshape(-1, group_size).tolist()

    dims, permutation = ",".join(map(str, sizes)), ",".join(map(str, order))
    axes = ",".join(f"'{name}'={size}" for name, size in mesh_shape.items())
    texts = [
        "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in expected) + "}",
        f"[{count // group_size},{group_size}]<=[{dims}]T({permutation})",
        f"mesh[{axes}] {{{','.join(repr(names[i]) for i in kept)}}}",
    ]
    for text in texts:
        groups = replica_groups(text, count)
        assert sorted(groups) == sorted(map(tuple, expected))
        assert mesh_axes(groups, mesh_shape) == tuple(n for n in names if n in chosen and mesh_shape[n] > 1)


def test_shuffled_groups():
    """The order of groups, and of devices in a group, does not matter."""
    assert mesh_axes(((3, 1), (0, 2)), {"data": 2, "model": 2}) == ("data",)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), "half of the axis"),
        (((0, 1, 2), (3, 4, 5, 6, 7)), "groups of unequal size"),
        (((0, 9),), "a device outside of the mesh"),
        ((), "no groups"),
    ],
)
def test_groups_along_parts_of_axes(groups, why):
    """They have no mesh axes."""
    assert mesh_axes(groups, {"model": 8}) is None, why


def test_axes_of_a_permutation():
    mesh_shape = {"data": 2, "model": 4}
    assert permute_axes(((0, 1), (1, 2), (2, 3)), mesh_shape) == ("model",)
    assert permute_axes(((0, 4), (4, 0)), mesh_shape) == ("data",)
    assert permute_axes(((1, 4), (4, 1)), mesh_shape) == ("data", "model")
    assert permute_axes(((2, 2),), mesh_shape) == ()
    assert permute_axes(((0, 8),), mesh_shape) is None
