"""Search of networks of cost tables for the assignment of least cost.

`shardplan.search.network` defines the networks, `shardplan.search.methods` the searches.
"""

from shardplan.search.graph.pairwise_usage import PairUsage as PairUsage
from shardplan.search.graph.pairwise_usage import all_extended as all_extended
from shardplan.search.graph.pairwise_usage import extended as extended
from shardplan.search.graph.pairwise_usage import with_pairs as with_pairs
from shardplan.search.graph.subnetwork import Part as Part
from shardplan.search.improve.coordinate_descent import Descent as Descent
from shardplan.search.improve.coordinate_descent import descents as descents
from shardplan.search.improve.mixtures import Mixtures as Mixtures
from shardplan.search.marginals import Marginals as Marginals
from shardplan.search.methods import METHODS as METHODS
from shardplan.search.methods import solve as solve
from shardplan.search.network import Annotation as Annotation
from shardplan.search.network import Hint as Hint
from shardplan.search.network import Network as Network
from shardplan.search.network import NetworkError as NetworkError
from shardplan.search.network import Usage as Usage
from shardplan.search.solution import STATUSES as STATUSES
from shardplan.search.solution import Progress as Progress
from shardplan.search.solution import Solution as Solution
