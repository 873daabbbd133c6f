"""Where reward files import `bounded` from, a comparison with a limit on its computing, which a guest offers here."""

from __future__ import annotations

from strop.base.lazy_names import lazy_names

__all__: list[str] = []

__getattr__, __dir__ = lazy_names(__name__, {})
