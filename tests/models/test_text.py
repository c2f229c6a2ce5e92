"""The text corpus: real, reproducible, and served as next-byte batches."""

import itertools

import numpy as np
import pytest

from shardplan.models import text


def test_text_is_english():
    corpus = text.load()
    assert corpus.dtype == np.uint8
    assert len(corpus) > 400_000
    assert bytes(corpus).decode().count(" the ") > 3000


def test_batches_are_deterministic_and_labels_follow_inputs():
    corpus = text.load()
    first, same, other = (
        list(itertools.islice(text.batches(corpus, batch=4, sequence=32, seed=seed), 3)) for seed in (1, 1, 2)
    )
    for one, two in zip(first, same, strict=True):
        np.testing.assert_array_equal(one["inputs"], two["inputs"])
        np.testing.assert_array_equal(one["inputs"][:, 1:], one["labels"][:, :-1])
    assert not (first[0]["inputs"] == other[0]["inputs"]).all()
    assert not (first[0]["inputs"] == first[1]["inputs"]).all()


def test_batches_are_of_the_corpus_up_to_its_end():
    corpus = np.arange(5, dtype=np.uint8)
    batch = next(text.batches(corpus, batch=64, sequence=3))
    rows = {tuple(row) for row in np.concatenate([batch["inputs"], batch["labels"][:, -1:]], axis=1).tolist()}
    assert rows == {(0, 1, 2, 3), (1, 2, 3, 4)}


def test_short_corpus():
    with pytest.raises(ValueError, match="the corpus has 5 bytes"):
        next(text.batches(np.zeros(5, np.uint8), batch=1, sequence=5))
