"""Layouts by hand: the published recipes of experts, as references for plans.

A baseline over a mesh of the axes `data` and `tensor` has the split of each parameter, the part of the state that the
data axis splits too (ZeRO), and the layouts of activations whose dimensions the model names:

    megatron = Baseline("Megatron", data=2, tensor=4, weights=(("*/up/kernel", P(None, "tensor")), ...),
                        activations={"batch": "data", "mlp": "tensor"})
    report = measure(lower(megatron, training, gpu_mesh("h100", (2, 4), AXES)))

The step is the model's own, written as experts do: gradients are reduced into the layout of the optimizer, and
parameters are all-gathered from there.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from shardplan.models import Batch, State, Training
from shardplan.models.logical import Layouts, logical_axes

AXES = ("data", "tensor")
Weights = tuple[tuple[str, PartitionSpec], ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A way to split a step over `data` x `tensor` devices.

    Attributes:
        stage: the state that the data axis splits: 0 nothing, 1 the optimizer's part (ZeRO-1), 3 all of it (ZeRO-3;
            weights are all-gathered to compute).
        gathered_by_xla: XLA chooses where weights are all-gathered, and may send activations instead.
        weights: patterns of parameter paths (`layer_0/mlp/up/kernel`; * is anything) to the split over `tensor`, the
            first that matches. A dimension that does not divide stays whole.
        batch: the layout of the batch, cut to the rank of each leaf.
        activations: names of dimensions to mesh axes, as `shardplan.models.logical.logical_axes` takes them.
    """

    name: str
    data: int = 1
    tensor: int = 1
    stage: int = 0
    gathered_by_xla: bool = False
    weights: Weights = ()
    batch: PartitionSpec = field(default_factory=lambda: PartitionSpec("data"))
    activations: Layouts = field(default_factory=lambda: {"batch": "data"})

    @property
    def title(self) -> str:
        sizes = f"{self.data} x {self.tensor}" if self.data > 1 and self.tensor > 1 else ""
        return f"{self.name} {sizes}".strip()


@dataclass(frozen=True, slots=True)
class Specs:
    """PartitionSpecs per parameter: for computation, for the optimizer, and for storage."""

    computing: Any
    updating: Any
    kept: Any


def specs_of(baseline: Baseline, params: Any, mesh: Mesh) -> Specs:
    """The `Specs` of a tree of parameters."""
    computing = jax.tree.map_with_path(lambda path, leaf: _split_by_rule(baseline, path_text(path), leaf, mesh), params)
    split = jax.tree.map(lambda leaf, spec: _split_over_data(leaf, spec, mesh), params, computing)
    updating = split if baseline.stage >= 1 else computing
    return Specs(computing, updating, split if baseline.stage >= 3 else computing)


def path_text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def fitting(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """`spec` for a tensor, without entries above its rank or on sizes that do not divide."""
    kept = []
    for size, axes in zip(shape, spec, strict=False):
        names = (axes,) if isinstance(axes, str) else (axes or ())
        kept.append(axes if size and size % prod(mesh.shape[name] for name in names) == 0 else None)
    return PartitionSpec(*kept)


def _split_by_rule(baseline: Baseline, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> PartitionSpec:
    found = (spec for pattern, spec in baseline.weights if fnmatchcase(path, pattern))
    return fitting(next(found, PartitionSpec()), leaf.shape, mesh)


def _split_over_data(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """The largest dimension that is still whole and that the data axis divides, split over it."""
    taken = list(spec) + [None] * (len(leaf.shape) - len(spec))
    if any("data" in ((axes,) if isinstance(axes, str) else axes or ()) for axes in taken):
        return spec
    free = [d for d, size in enumerate(leaf.shape) if not taken[d] and size and size % mesh.shape["data"] == 0]
    if not free:
        return spec
    taken[max(free, key=lambda d: (leaf.shape[d], -d))] = "data"
    return PartitionSpec(*taken)


def lower(
    baseline: Baseline, training: Training, mesh: Mesh, compute_dtype: DTypeLike = jnp.float32
) -> jax.stages.Lowered:
    """The training step under a baseline, the state donated, for the devices of `mesh`, whose axes are `AXES`.

    Weights that the model computes with in `compute_dtype` are all-gathered in this type.
    """
    state, batch = training.state, training.batch
    _check_batch(baseline, batch, mesh)
    specs = specs_of(baseline, state["params"], mesh)
    shard = partial(jax.tree.map, partial(NamedSharding, mesh), is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    state_shardings = shard(_state_specs(state, specs))
    batch_shardings = shard(jax.tree.map(lambda leaf: fitting(baseline.batch, leaf.shape, mesh), batch))
    step = jax.jit(
        step_by_hand(baseline, training, specs, Gathering(mesh, compute_dtype)),
        in_shardings=(state_shardings, batch_shardings),
        out_shardings=(state_shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    with logical_axes(mesh, baseline.activations) if baseline.activations else nullcontext():
        return step.lower(state, batch)


def _check_batch(baseline: Baseline, batch: Batch, mesh: Mesh) -> None:
    """Raises `ValueError` if no leaf of the batch can be split as planned: all devices would do the same work."""
    asked = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis in str(baseline.batch)}
    split = str([fitting(baseline.batch, leaf.shape, mesh) for leaf in jax.tree.leaves(batch)])
    missing = [axis for axis in asked if axis not in split]
    if missing:
        raise ValueError(f"`{baseline.title}` splits the batch over `{missing[0]}`, which divides no leaf of it")


def _state_specs(state: State, specs: Specs) -> State:
    """A spec per leaf of the state: a leaf of the optimizer belongs to the parameter whose path ends its own."""
    by_path = {
        path_text(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree.leaves_with_path(state["params"]), jax.tree.leaves(specs.updating), strict=True
        )
    }

    def of_optimizer(path: Any, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        names = path_text(path).split("/")
        for start in range(len(names)):
            shape, spec = by_path.get("/".join(names[start:]), (None, PartitionSpec()))
            if shape == leaf.shape:
                return spec
        return PartitionSpec()

    found = {name: jax.tree.map(lambda _: PartitionSpec(), value) for name, value in state.items()}
    opt_state = jax.tree.map_with_path(of_optimizer, {name: state[name] for name in state if name == "opt_state"})
    return {**found, "params": specs.kept, **opt_state}


# Parameters that models read in their stored precision.
KEPT_PRECISE = ("*embedding*", "*tokens*", "*positions*", "*router*")


@dataclass(frozen=True, slots=True)
class Gathering:
    """The all-gather of weights before computation: the mesh, and the element type of the computation."""

    mesh: Mesh
    compute_dtype: DTypeLike

    def constrain(self, tree: Any, wanted: Any) -> Any:
        put = jax.lax.with_sharding_constraint
        return jax.tree.map(lambda x, spec: put(x, NamedSharding(self.mesh, spec)), tree, wanted)

    def converted(self, params: Any) -> Any:
        """The parameters as the model would convert them itself."""
        return jax.tree.map_with_path(lambda path, x: x.astype(self.dtype(path, x)), params)

    def dtype(self, path: Any, leaf: Any) -> Any:
        precise = leaf.ndim < 2 or any(fnmatchcase(path_text(path), pattern) for pattern in KEPT_PRECISE)
        return leaf.dtype if precise else self.compute_dtype

    def gather(self, params: Any, specs: Specs) -> Any:
        """Weights to compute with. Their gradients are reduced into the optimizer's layout, without a whole copy."""
        types = jax.tree.map(lambda x: x.dtype, params)

        @jax.custom_vjp
        def gathered(params: Any) -> Any:
            # Pinned to the stored layout during the conversion: without the pin XLA converts after the all-gather.
            converted = self.constrain(self.converted(params), specs.kept)
            return self.constrain(converted, specs.computing)

        def backward(_: None, gradients: Any) -> tuple[Any]:
            return (jax.tree.map(lambda x, d: x.astype(d), self.constrain(gradients, specs.updating), types),)

        gathered.defvjp(lambda params: (gathered(params), None), backward)
        return gathered(params)


def step_by_hand(
    baseline: Baseline, training: Training, specs: Specs, gathering: Gathering
) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """The model's step with its weights gathered, its gradients reduced and its updates made in the layouts of the
    specs.

    The step of a model without its parts stays as it is.
    """
    loss_function, optimizer, constrain = training.loss_function, training.optimizer, gathering.constrain
    if loss_function is None or optimizer is None:
        return lambda state, batch: training.train_step(state, batch)

    def loss_of(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        weights = params if baseline.gathered_by_xla else gathering.gather(params, specs)
        return loss_function(weights, others, batch)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        others = {name: value for name, value in state.items() if name not in ("params", "opt_state", "step")}
        data = training.batch_for(state, batch)
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"], others, data)
        gradients, params = constrain(gradients, specs.updating), constrain(state["params"], specs.updating)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], params)
        params = constrain(optax.apply_updates(params, updates), specs.updating)
        return {**others, "params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    return step
