"""Doctests import every file of the package; an integration can be imported only where its library is."""

from importlib.util import find_spec

LIBRARIES = ("accelerate", "lightning", "ray", "transformers")

collect_ignore = [f"src/gradientflow/integrations/{name}.py" for name in LIBRARIES if find_spec(name) is None]
