"""Models to plan as users plan theirs: an MLP, a GPT and a ResNet-50 in Flax, each with its Optax optimiser.

Each module has a `Config` and a function `training(config)`, which gives a `Training`: the step, and what it takes, as
shapes (enough to plan) or as arrays (to run). The command line takes them too:
`shardplan plan shardplan.models.gpt:training --mesh data=8`.

>>> import jax
>>> from shardplan.models import gpt
>>> training = gpt.training(gpt.Config(layers=1, width=64, heads=4, vocabulary=256, sequence=32, batch=8))
>>> training.state["params"]["head"]["kernel"]
ShapeDtypeStruct(shape=(64, 256), dtype=float32)
>>> state, loss = jax.eval_shape(training.train_step, training.state, training.batch)
>>> loss
ShapeDtypeStruct(shape=(), dtype=float32)
"""

from shardplan.models.training import Batch as Batch
from shardplan.models.training import State as State
from shardplan.models.training import Training as Training
