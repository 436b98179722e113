"""The one place where this package's version is written."""

__version__ = "0.1.0"
