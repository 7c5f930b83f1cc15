"""Arrays as files of NumPy (``.npy``, version 1.0), written whole or not at all.

Holds: ``check_array_path``, ``write_array``.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pykvstream.errors import DeviceError, InvalidArgument
from pykvstream.runtime.whole_file import check_replaceable, replacing


def check_array_path(where: Path) -> None:
    """Whether ``write_array`` could write there. Raises ``DeviceError``, ``InvalidArgument``."""
    try:
        check_replaceable(where)
    except OSError as error:
        raise DeviceError(f"array {str(where)!r}: cannot be written: {error.strerror}") from None
    except InvalidArgument:
        raise InvalidArgument(f"array {str(where)!r}: no regular file") from None


def write_array(where: Path, rows: NDArray[np.float32]) -> None:
    """Write rows ``[n, columns]``. Raises ``DeviceError``; what stood there is as it was then."""
    made = io.BytesIO()
    np.save(made, rows, allow_pickle=False)
    try:
        with replacing(where) as file:
            file.write(made.getbuffer())
    except OSError as error:
        raise DeviceError(f"array {str(where)!r}: {error.strerror}") from None
