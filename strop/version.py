"""The version of strop."""

__version__ = "0.2.0"
