"""Convolutions: strides, padding, both dilations, feature and batch groups. Their gradients are convolutions too.

In one dimension ``out[b, co, x] = Sum(ci, dx) data[b, ci, x*stride + dx*dilation - pad] * filters[co, ci, dx]``.
Positions outside of the data contribute nothing. Dilation of the data divides its position by the dilation where it is
a multiple.
"""

from shardplan.rules.contraction import contract
from shardplan.rules.equation import Equation, Semantics, expression, letters, name_of
from shardplan.rules.expression import Affine, Apply, Expression, Read, Result, index


def window_position(x: Affine, dx: Affine, stride: int, dilation: int, pad: int, base_dilation: int) -> Affine:
    """The position of element ``dx`` of window ``x`` in the (undilated) data."""
    return (x * stride + dx * dilation - pad).exactly(base_dilation)


def _conv_general_dilated(equation: Equation) -> Expression:
    params, filters = equation.params, equation.inputs[1]
    (out,) = equation.outputs
    numbers = params["dimension_numbers"]
    batch_dim, feature_dim, *space = numbers.lhs_spec
    out_feature_dim, in_feature_dim, *filter_space = numbers.rhs_spec
    out_batch_dim, out_channel_dim, *out_space = numbers.out_spec
    b, co, ci = index("b"), index("co"), index("ci")
    xs, dxs = letters("x", len(space)), letters("dx", len(space))
    sizes = {"b": out.shape[out_batch_dim], "co": out.shape[out_channel_dim]}
    sums = {"ci": filters.shape[in_feature_dim]}
    data_at, filters_at, out_at = ([index("")] * (len(space) + 2) for _ in range(3))

    channels = filters.shape[out_feature_dim]
    data_at[batch_dim], data_at[feature_dim] = b, ci
    if (groups := params["feature_group_count"]) > 1:
        data_at[feature_dim] = (co // (channels // groups)) * sums["ci"] + ci
    if (groups := params["batch_group_count"]) > 1:
        data_at[batch_dim] = (co // (channels // groups)) * sizes["b"] + b
    filters_at[out_feature_dim], filters_at[in_feature_dim] = co, ci
    out_at[out_batch_dim], out_at[out_channel_dim] = b, co

    padded = False
    for n, (x, dx) in enumerate(zip(xs, dxs, strict=True)):
        window = filters.shape[filter_space[n]]
        (low, high), base = params["padding"][n], params["lhs_dilation"][n]
        sizes[name_of(x)] = out.shape[out_space[n]]
        if window == 1:
            dx = Affine(())
        else:
            sums[name_of(dx)] = window
        data_at[space[n]] = window_position(x, dx, params["window_strides"][n], params["rhs_dilation"][n], low, base)
        filters_at[filter_space[n]], out_at[out_space[n]] = dx, x
        padded |= low > 0 or high > 0 or base > 1
    product = Apply("*", (Read(0, tuple(data_at), padded), Read(1, tuple(filters_at))))
    result = Result(tuple(out_at), contract(tuple(sums), product))
    return expression(equation, sizes | sums, [result], ("data", "filters"))


RULES: dict[str, Semantics] = {"conv_general_dilated": _conv_general_dilated}
