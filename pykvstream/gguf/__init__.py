"""GGUF model files: mapped reading, small writing, and a numpy reference of the block formats.

Holds: the public names of ``reader``, ``metadata``, ``parse``, ``types``, ``codecs`` and ``writer``.
"""

from pykvstream.gguf.codecs import DECODABLE, ENCODABLE, decode, encode
from pykvstream.gguf.metadata import LazyStrings, Metadata, MetaValue
from pykvstream.gguf.parse import TensorInfo
from pykvstream.gguf.reader import GgufFile
from pykvstream.gguf.types import TYPES_BY_ID, GgmlType, ValueType
from pykvstream.gguf.writer import GgufWriter

__all__ = [
    "DECODABLE",
    "ENCODABLE",
    "TYPES_BY_ID",
    "GgmlType",
    "GgufFile",
    "GgufWriter",
    "LazyStrings",
    "MetaValue",
    "Metadata",
    "TensorInfo",
    "ValueType",
    "decode",
    "encode",
]
