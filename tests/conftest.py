"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# Examples are drawn the same way each time, and a loaded machine is no failure.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
