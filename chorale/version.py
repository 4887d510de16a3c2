"""The version: that of the git tag, which the build writes into ``chorale/_version.py``."""

try:
    from chorale._version import __version__
except ImportError:  # a checkout that was not installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
