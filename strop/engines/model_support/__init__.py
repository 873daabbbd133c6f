"""Models that packed computation supports: others are refused by name before they are loaded, or tried once they are.

parity.py       A loaded model on packed tokens, compared with its own forward pass
unsupported.py  Model families that packed computation does not carry
"""

from strop.engines.model_support.parity import check_packed
from strop.engines.model_support.unsupported import check_family, check_rotary, check_type

__all__ = ["check_family", "check_packed", "check_rotary", "check_type"]
