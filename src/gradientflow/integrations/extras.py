"""Packages that an integration needs and that this package does not install by itself."""

from __future__ import annotations


def missing(extra: str, package: str | None = None) -> ModuleNotFoundError:
    """To be raised where `package` cannot be imported; says how to get it.

    >>> str(missing("ray"))
    "gradientflow.integrations.ray needs ray: pip install 'gradientflow[ray]'"
    """
    words = f"gradientflow.integrations.{extra} needs {package or extra}: pip install 'gradientflow[{extra}]'"
    return ModuleNotFoundError(words, name=package or extra)
