"""Which models packed computation carries: refused by name before they are loaded, or tried once they are.

unsupported.py  model families that are known not to run, and what they do
parity.py   a loaded model on packed tokens, compared with its own forward pass

Layers that carry a state (linear attention) have no keys:
packed.py  such layers on packed rows
states.py     a model that has some, and its states in the native engine
"""

from strop.engines.model_support.parity import check_packed
from strop.engines.model_support.unsupported import check_family, check_type

__all__ = ["check_family", "check_packed", "check_type"]
