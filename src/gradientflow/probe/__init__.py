"""Measures the network between the workers, or reads what other programs measured, into the same tables."""

from gradientflow.probe.measure import measure_network, osu_table
from gradientflow.probe.readers import read_nccl_tests, read_osu

__all__ = ["measure_network", "osu_table", "read_nccl_tests", "read_osu"]
