"""Measurements on real data: what `gradientflow demo` runs."""
