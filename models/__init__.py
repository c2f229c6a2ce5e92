"""Models written as users write them, each with its Optax optimiser; `NAMES` lists them.

Each module has a `Config` and a function `training(config)`, which gives a `Training`: the step, and its arguments as
shapes (enough to plan) or as arrays (to run). The command line takes them too: `shardplan plan
shardplan.models.gpt:training --mesh data=8`. A module also names some configurations. `CONFIGS` are the published ones
by name, `SMALL` runs on a CPU in seconds, and `BENCHMARK` has the widths of real ones in few layers.

>>> import jax
>>> from shardplan.models import gpt
>>> training = gpt.training(gpt.Config(layers=1, width=64, heads=4, vocabulary=256, sequence=32, batch=8))
>>> training.state["params"]["head"]["kernel"]
ShapeDtypeStruct(shape=(64, 256), dtype=float32)
>>> state, loss = jax.eval_shape(training.train_step, training.state, training.batch)
>>> loss
ShapeDtypeStruct(shape=(), dtype=float32)
"""

from importlib import import_module
from types import ModuleType

from shardplan.models.training import Batch as Batch
from shardplan.models.training import State as State
from shardplan.models.training import Training as Training

NAMES = (
    "bert",
    "darknet",
    "dcgan",
    "dit",
    "dlrm",
    "gnn",
    "gpt",
    "inception",
    "llama",
    "lstm",
    "mamba",
    "mlp",
    "moe",
    "resnet",
    "t5",
    "unet3d",
    "vgg",
    "vit",
    "wide_resnet",
)
"""The models, each a module of this package."""


def load(name: str) -> ModuleType:
    """The module of a model: `load("gpt").training(load("gpt").SMALL)`.

    Raises `ValueError` for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"there is no model `{name}`; there are {', '.join(NAMES)}")
    return import_module(f"{__name__}.{name}")
