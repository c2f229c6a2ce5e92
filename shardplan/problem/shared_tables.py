"""What problems over one mesh at the same prices share: strategies, transitions and tables, each derived once.

A program and its rewritten forms (`shardplan.program.recompute`) have most operations in common."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardplan.layout.layout import LayoutSpace
from shardplan.layout.objectives import Prices
from shardplan.layout.transitions import Transitions
from shardplan.problem.strategies import StrategyMaker
from shardplan.problem.strategy import Choices


@dataclass(slots=True, eq=False)
class SharedTables:
    """Strategies, transitions and tables of one mesh at one price.

    ``reduce_dtype`` is the element type of reductions of contractions, None for their own type. Without ``islands``
    every reduction is left to XLA, and priced as XLA does it. ``tables`` are by the identities of choices and
    transitions, which ``kept`` keeps alive.
    """

    space: LayoutSpace
    prices: Prices
    reduce_dtype: Any = None
    islands: bool = True
    maker: StrategyMaker = field(init=False, repr=False)
    transitions: Transitions = field(init=False, repr=False)
    overlapped: Transitions = field(init=False, repr=False)
    through_device: Transitions = field(init=False, repr=False)
    tables: dict[Any, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    passing: dict[Any, Choices] = field(default_factory=dict, init=False, repr=False)
    kept: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.maker = StrategyMaker(self.space)
        self.transitions = Transitions(self.space, self.prices)
        self.overlapped = Transitions(self.space, replace(self.prices, hidden=True))
        self.through_device = Transitions(self.space, replace(self.prices, through_device=True))

    def like(self, known: SharedTables) -> SharedTables:
        """The known tables where they are of the same layouts and prices, else these."""
        same = self.space.same_layouts(known.space) and self.prices == known.prices
        return known if same and (self.reduce_dtype, self.islands) == (known.reduce_dtype, known.islands) else self
