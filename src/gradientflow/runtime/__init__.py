"""Runs a plan inside a real training loop."""
