"""Model architectures: what a file says (``config``, ``hybrid_config``) and must hold (``tensors``), its weights on a
device (``weights``), and the graph of each family (``architectures``).

What a file says is read without the native core: the names below need none of it.
"""

from pykvstream.models.config import ModelConfig
from pykvstream.models.hybrid_config import HYBRIDS

__all__ = ["HYBRIDS", "ModelConfig"]
