"""Real text without a download: the documentation topics that CPython ships, read as bytes.

>>> from shardplan.models import text
>>> corpus = text.load()
>>> batch = next(text.batches(corpus, batch=4, sequence=16, seed=0))
>>> batch["inputs"].shape, bool((batch["inputs"][:, 1:] == batch["labels"][:, :-1]).all())
((4, 16), True)
"""

from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np

VOCABULARY = 256


def load() -> np.ndarray:
    """All topics in the order of their names, as uint8: several hundred thousand bytes, by the version of CPython."""
    joined = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(joined.encode("utf-8"), np.uint8)


def batches(corpus: np.ndarray, batch: int, sequence: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches from random places of the corpus, the same sequence of batches for the same seed.

    Each has `inputs` and `labels`, int32 `[batch, sequence]`: the labels are the inputs one byte later. Raises
    `ValueError` if the corpus is shorter than a sequence and its last label.
    """
    if len(corpus) < sequence + 1:
        raise ValueError(f"the corpus has {len(corpus)} bytes, too few for a sequence of {sequence} and its last label")
    generator = np.random.default_rng(seed)
    window = np.arange(sequence + 1)
    while True:
        starts = generator.integers(0, len(corpus) - sequence, size=batch)
        tokens = corpus[starts[:, None] + window].astype(np.int32)
        yield {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
