"""Hosts on one machine: real TCP over links of a chosen rate, without a second machine."""

from gradientflow.lab.check import check_rate
from gradientflow.lab.hosts import Counters, Host, Lab, LabStatus
from gradientflow.lab.limits import format_rate, parse_rate
from gradientflow.lab.shell import LabUnavailable

__all__ = ["Counters", "Host", "Lab", "LabStatus", "LabUnavailable", "check_rate", "format_rate", "parse_rate"]
