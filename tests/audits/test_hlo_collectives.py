"""Reading collectives from HLO text: forms, loops, branches, metadata, and speed."""

import time

import pytest

from shardplan.compiled.hlo.collectives import collectives
from shardplan.layout.collectives import CollectiveKind

HEADER = """HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "train.py"
2 "model.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=45 end_line=45 column=12 end_column=12}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=8 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}
"""
ALL = "replica_groups=[1,8]<=[8]"


def module(body: str, *computations: str) -> str:
    blocks = [
        HEADER,
        *computations,
        "ENTRY %main (a: f32[64,8], b: bf16[16]) -> f32[] {",
        "  %a = f32[64,8]{1,0} parameter(0)",
    ]
    return "\n".join([*blocks, "  %b = bf16[16]{0} parameter(1)", body, "}", ""])


A, B = 64 * 8 * 4, 16 * 2  # bytes of the two parameters

FORMS = [
    # instruction lines, kind, bytes, bytes sent, dtypes, synchronous
    (f"%r = f32[64,8]{{1,0}} all-reduce(%a), {ALL}, to_apply=%add", "all-reduce", A, 2 * 7 * A // 8, ("f32",), True),
    (
        f'%r = f32[64,8]{{1,0}} all-reduce-start(%a), {ALL}, to_apply=%add, backend_config={{"is_sync":false}}\n'
        "  %d = f32[64,8]{1,0} all-reduce-done(%r)",
        "all-reduce",
        A,
        2 * 7 * A // 8,
        ("f32",),
        False,
    ),
    (
        f"%r = (f32[64,8]{{1,0}}, bf16[16]{{0}}) all-reduce-start(%a, %b), {ALL}, to_apply=%add",
        "all-reduce",
        A + B,
        2 * 7 * (A + B) // 8,
        ("f32", "bf16"),
        False,
    ),
    (
        "%r = ((f32[64,8]{1,0}, bf16[16]{0}), (f32[8,8]{1,0}, bf16[2]{0})) reduce-scatter-start(%a, /*index=1*/%b), "
        f'{ALL}, dimensions={{0}}, to_apply=%add, backend_config={{"is_sync":true}}',
        "reduce-scatter",
        A + B,
        7 * (A + B) // 8,
        ("f32", "bf16"),
        True,
    ),
    (
        f"%r = (f32[64,8]{{1,0}}, f32[512,8]{{1,0}}) all-gather-start(%a), {ALL}, dimensions={{0}}",
        "all-gather",
        8 * A,
        7 * A,
        ("f32",),
        False,
    ),
    (f"%r = f32[64,8]{{1,0}} all-to-all(%a), {ALL}, dimensions={{0}}", "all-to-all", A, 7 * A // 8, ("f32",), True),
    (
        "%r = (f32[64,8], f32[64,8], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,2}}",
        "collective-permute",
        A,
        A,
        ("f32",),
        False,
    ),
    (
        "%r = f32[64,8]{1,0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}",
        "collective-permute",
        A,
        0,
        ("f32",),
        True,
    ),
    (
        f"%r = f32[64,8]{{1,0:T(8,128)S(5)}} all-reduce(a), {ALL}, to_apply=add",
        "all-reduce",
        A,
        2 * 7 * A // 8,
        ("f32",),
        True,
    ),
    (
        f"%r = f32[64,8] all-reduce(f32[64,8]{{1,0}} %a), {ALL}, to_apply=%add",
        "all-reduce",
        A,
        2 * 7 * A // 8,
        ("f32",),
        True,
    ),
]


@pytest.mark.parametrize(("line", "kind", "size", "sent", "dtypes", "synchronous"), FORMS)
def test_forms(line, kind, size, sent, dtypes, synchronous):
    (found,) = collectives(module("  " + line))
    assert (found.kind, found.bytes, found.bytes_sent, found.times) == (kind, size, sent, 1)
    assert (found.dtypes, found.synchronous, found.computation) == (dtypes, synchronous, "main")


def test_formulas():
    kinds = map(CollectiveKind, ("all-reduce", "reduce-scatter", "all-gather", "all-to-all"))
    assert [800 * kind.sent(8) for kind in kinds] == [1400, 700, 700, 700]
    assert CollectiveKind("collective-permute").sent(2) == 1
    assert CollectiveKind("all-reduce").sent(1) == 0
    assert CollectiveKind("all-reduce").sent(8) == 1.75


def test_no_groups_are_one_group_of_all_devices():
    (found,) = collectives(module("  %r = f32[64,8] all-reduce(%a), replica_groups={}, to_apply=%add"))
    assert found.groups == (tuple(range(8)),)
    assert found.group_size == 8


def test_all_spellings_of_groups_in_context():
    spellings = ["{{0,1},{2,3},{4,5},{6,7}}", "[4,2]<=[8]", "mesh['x'=4,'y'=2] {'y'}", "[4,2]<=[2,2,2]T(0,1,2)"]
    body = "\n".join(
        f"  %r{i} = f32[64,8] all-reduce(%a), channel_id={i}, replica_groups={text}, use_global_device_ids=true"
        for i, text in enumerate(spellings)
    )
    assert {found.axes({"x": 4, "y": 2}) for found in collectives(module(body))} == {("y",)}


LOOP = """%inner (p: (f32[16])) -> (f32[16]) {
  %p = (f32[16]{0}) parameter(0)
  %x = f32[16]{0} get-tuple-element(%p), index=0
  %sum = f32[16]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %r = (f32[16]{0}) tuple(%sum)
}

%outer (p: (f32[16])) -> (f32[16]) {
  %p = (f32[16]{0}) parameter(0)
  %w = (f32[16]{0}) while(%p), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %y = f32[16]{0} get-tuple-element(%w), index=0
  %sum.1 = f32[16]{0} all-reduce(%y), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %r.1 = (f32[16]{0}) tuple(%sum.1)
}
"""


def test_trip_counts_multiply_through_nested_loops():
    line = '  %w = (f32[16]{0}) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}'
    found = collectives(module(line, LOOP))
    assert [(c.name, c.times) for c in found] == [("sum", 15), ("sum.1", 3)]


def test_a_loop_of_unknown_length_counts_once():
    found = collectives(module("  %w = (f32[16]{0}) while(%t), condition=%c, body=%inner", LOOP))
    assert [(c.times, c.assumed) for c in found] == [(1, True)]


@pytest.mark.parametrize(
    ("path", "times"),
    [
        ("jit(f)/op9/shardplan_trips_7/while", 7),
        ("shardplan_trips_3/jit(g)/shardplan_trips_7/while", 7),
        ("shardplan_trips_7/while/body/while", 1),
        ("shardplan_trips_7/cond/branch_1_fun/while", 1),
    ],
)
def test_a_loop_whose_length_is_stated(path, times):
    """The count of `shardplan.trip_count` is in the loop's path; it holds for loops directly in the scope alone."""
    line = f'  %w = (f32[16]{{0}}) while(%t), condition=%c, body=%inner, metadata={{op_name="{path}"}}'
    assert [(c.times, c.assumed) for c in collectives(module(line, LOOP))] == [(times, times == 1)]


def test_a_known_length_goes_before_a_stated_one():
    """What the compiler has found out is so."""
    known = 'metadata={op_name="shardplan_trips_7/while"}, backend_config={"known_trip_count":{"n":"3"}}'
    line = f"  %w = (f32[16]{{0}}) while(%t), condition=%c, body=%inner, {known}"
    assert [(c.times, c.assumed) for c in collectives(module(line, LOOP))] == [(3, False)]


def test_a_condition_with_a_collective():
    """It counts as often as the body."""
    line = '  %w = (f32[16]{0}) while(%t), condition=%inner, body=%b, backend_config={"known_trip_count":{"n":"4"}}'
    assert [(c.name, c.times) for c in collectives(module(line, LOOP))] == [("sum", 4)]


def test_computations_called_twice_and_never():
    """The first counts twice, the other one does not count."""
    called = LOOP.split("\n\n")[0]
    body = "  %c = (f32[16]{0}) call(%t), to_apply=%inner\n  %f = (f32[16]{0}) fusion(%c), kind=kCustom, calls=%inner"
    assert len(collectives(module(body, called))) == 2
    assert collectives(module("  %n = f32[64,8] negate(%a)", called)) == ()


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%inner, %outer}", "true_computation=%outer, false_computation=%inner"],
)
def test_a_conditional(branches):
    """The branch that sends most counts."""
    found = collectives(module(f"  %c = (f32[16]{{0}}) conditional(%i, %t, %t), {branches}", LOOP))
    assert [(c.name, c.times) for c in found] == [("sum", 5), ("sum.1", 1)]


def test_a_generic_async_pair():
    """Its collective is that of the wrapped computation."""
    wrapped = """%wrapped (p: f32[64,8]) -> f32[8,8] {
  %p = f32[64,8]{1,0} parameter(0)
  ROOT %rs = f32[8,8]{1,0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
"""
    body = (
        '  %s = ((f32[64,8]), f32[8,8], s32[]) async-start(%a), calls=%wrapped, backend_config={"is_sync":false}\n'
        "  %u = ((f32[64,8]), f32[8,8], s32[]) async-update(%s)\n"
        "  %d = f32[8,8] async-done(%u), calls=%wrapped"
    )
    (found,) = collectives(module(body, wrapped))
    assert (found.kind, found.bytes, found.synchronous) == ("reduce-scatter", A, False)


def test_metadata_leads_to_scopes_and_source_lines():
    body = (
        '  %n = f32[64,8] negate(%a), metadata={op_name="jit(step)/op7/neg" stack_frame_id=1}\n'
        f'  %r = f32[64,8] all-reduce(%a), {ALL}, metadata={{op_name="jit(step)/op12/dot[\\"x\\"]" stack_frame_id=2}}\n'
        f"  %s = f32[64,8] all-reduce(%n), {ALL}\n"
        f'  %t = f32[64,8] all-reduce(%a), {ALL}, metadata={{op_name="f" source_file="old.py" source_line=3}}'
    )
    first, second, third = collectives(module(body))
    assert (first.op_name, first.source) == ('jit(step)/op12/dot["x"]', "model.py:7")
    assert (second.op_name, second.source) == ("", "")
    assert second.tensors[0].producers == ("jit(step)/op7/neg",)  # what it reduces is still known
    assert (third.op_name, third.source) == ("f", "old.py:3")


def test_tensors_of_a_merged_collective():
    """Each has its own producers and consumers."""
    body = (
        '  %n = f32[64,8] negate(%a), metadata={op_name="s/op1/neg"}\n'
        "  %c = f32[64,8] copy(%n)\n"
        '  %e = bf16[16] exponential(%b), metadata={op_name="s/op2/exp"}\n'
        f"  %g = ((f32[64,8], bf16[16]), (f32[512,8], bf16[128])) all-gather-start(%c, %e), {ALL}, dimensions={{0}}, "
        'metadata={op_name="s/op9/constraint"}\n'
        "  %d = (f32[512,8], bf16[128]) all-gather-done(%g)\n"
        "  %x = f32[512,8] get-tuple-element(%d), index=0\n"
        "  %y = bf16[128] get-tuple-element(%d), index=1\n"
        '  %u = f32[512,8] negate(%x), metadata={op_name="s/op3/neg"}\n'
        '  %v = bf16[128] negate(%y), metadata={op_name="s/op4/neg"}\n'
        '  %w = bf16[128] negate(%v), metadata={op_name="s/op5/neg"}'
    )
    (found,) = collectives(module(body))
    assert [(t.dtype, t.bytes) for t in found.tensors] == [("f32", 8 * A), ("bf16", 8 * B)]
    assert [t.producers for t in found.tensors] == [("s/op1/neg",), ("s/op2/exp",)]
    assert [t.consumers for t in found.tensors] == [("s/op3/neg",), ("s/op4/neg", "s/op5/neg")]


def test_kernels_between_start_and_end_are_counted():
    def text(synchronous: str) -> str:
        return module(
            f"  %g = f32[64,8] all-reduce-start(%a), {ALL}, backend_config={{{synchronous}}}\n"
            "  %f = f32[64,8] fusion(%a), kind=kLoop, calls=%add\n"
            "  %c = bf16[] constant(0)\n"
            "  %t = f32[64,8] bitcast(%f)\n"
            "  %k = f32[64,8] custom-call(%t)\n"
            "  %d = f32[64,8] all-reduce-done(%g)\n"
            "  %l = f32[64,8] fusion(%d), kind=kLoop, calls=%add"
        )

    (found,) = collectives(text('"is_sync":false'))
    assert (found.kernels_meanwhile, found.overlapped) == (2, True)
    (found,) = collectives(text('"is_sync":true'))
    assert not found.overlapped


@pytest.mark.parametrize(("dtype", "size"), [("pred", 64), ("s4", 32), ("f8e4m3fn", 64), ("c128", 1024), ("u16", 128)])
def test_element_types(dtype, size):
    body = f"  %x = {dtype}[64]{{0}} parameter(2)\n  %r = {dtype}[64]{{0}} all-to-all(%x), {ALL}, dimensions={{0}}"
    (found,) = collectives(module(body))
    assert (found.bytes, found.dtypes) == (size, (dtype,))


def test_a_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        collectives("stablehlo.module { }")


@pytest.mark.slow
def test_reading_takes_linear_time():
    def seconds(lines: int) -> float:
        padding = '"padding":"' + "x" * 300 + '"'
        body = "\n".join(
            f"  %r{i} = f32[64,8]{{1,0}} all-reduce(%a), {ALL}, to_apply=%add, backend_config={{{padding}}}\n"
            f"  %f{i} = (f32[64,8]{{1,0}}, f32[64,8]{{1,0}}) fusion(%r{i}, %a), calls=%add, metadata={{{padding}}}"
            for i in range(lines)
        )
        text = module(body)
        started = time.process_time()
        assert len(collectives(text)) == lines
        return time.process_time() - started

    seconds(500)  # caches of regular expressions and of groups
    assert seconds(8000) < 16 * 4 * max(seconds(500), 0.005)  # 5.4 MB of text
