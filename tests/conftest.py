"""Settings for all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Examples are drawn the same way each time, and a loaded machine is no failure.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")

# What a shell starts in the background ignores Ctrl-C and hands that on; tests send it to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What one test finds to be quickest is not to be remembered in the next, nor in the user's own cache.
os.environ["GRADIENTFLOW_CACHE"] = "off"
