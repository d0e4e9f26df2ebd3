"""What a message costs, what an iteration takes under a plan, and what no plan can beat.

Numbers only: no tensors are touched and `torch.distributed` is never imported.
"""

from gradientflow.cost.evaluate import Evaluation, Timing, evaluate, limit_s
from gradientflow.cost.table import Cost, CostTable, Line, Steps, ring_all_gather, ring_all_reduce, ring_reduce_scatter

__all__ = [
    "Cost",
    "CostTable",
    "Evaluation",
    "Line",
    "Steps",
    "Timing",
    "evaluate",
    "limit_s",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
]
