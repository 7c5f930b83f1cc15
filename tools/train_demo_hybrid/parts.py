"""Trained weights as they leave the machine: bf16 bits in parts, and a list of tensors. No PyTorch.

Holds: ``read_tensors``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_tensors(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Configuration, and every tensor as float32; bf16 bits are the upper halves of float32."""
    said = json.loads((folder / "model.json").read_text())
    raw = b"".join(path.read_bytes() for path in sorted(folder.glob("weights-*.bf16")))
    values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    tensors, at = {}, 0
    for name, shape in said["tensors"].items():
        size = math.prod(shape)
        tensors[name] = values[at : at + size].reshape(shape)
        at += size
    if at != len(values):
        raise SystemExit(f"{folder}: {len(values)} values, the list of tensors has {at}")
    return said["config"], tensors
