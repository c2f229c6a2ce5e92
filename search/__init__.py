"""Search over networks of cost tables; see `shardplan.search.network` for what they are."""

from shardplan.search.descending import Descent as Descent
from shardplan.search.descending import descents as descents
from shardplan.search.methods import METHODS as METHODS
from shardplan.search.methods import solve as solve
from shardplan.search.mixing import Mixtures as Mixtures
from shardplan.search.network import Annotation as Annotation
from shardplan.search.network import Hint as Hint
from shardplan.search.network import Network as Network
from shardplan.search.network import NetworkError as NetworkError
from shardplan.search.network import Usage as Usage
from shardplan.search.pairs import PairUsage as PairUsage
from shardplan.search.pairs import all_extended as all_extended
from shardplan.search.pairs import extended as extended
from shardplan.search.pairs import with_pairs as with_pairs
from shardplan.search.part import Part as Part
from shardplan.search.solution import STATUSES as STATUSES
from shardplan.search.solution import Progress as Progress
from shardplan.search.solution import Solution as Solution
