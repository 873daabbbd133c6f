"""The tiny models of tests/references/language_models.py as fixtures."""

from references.tiny_fixtures import float64_models, tiny, tiny_folder

__all__ = ["float64_models", "tiny", "tiny_folder"]
