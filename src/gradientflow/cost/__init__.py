"""What a message costs, what a pattern takes on a topology, what an iteration takes under a plan, and what no plan can
beat.

Numbers only: no tensors are touched and `torch.distributed` is never imported.
"""

from gradientflow.cost.evaluate import Evaluation, Timing, evaluate, limit_s
from gradientflow.cost.price import price
from gradientflow.cost.table import Cost, CostTable, Line, Steps, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from gradientflow.cost.topology import BCube, Hosts, Switch, Topology, Torus

__all__ = [
    "BCube",
    "Cost",
    "CostTable",
    "Evaluation",
    "Hosts",
    "Line",
    "Steps",
    "Switch",
    "Timing",
    "Topology",
    "Torus",
    "evaluate",
    "limit_s",
    "price",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
]
