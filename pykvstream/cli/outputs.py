"""What a command is about to write, beside what it reads and beside each other.

Holds: ``check_outputs``, ``models_of``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pykvstream.errors import InvalidArgument
from pykvstream.locate import find_model


def models_of(name: str, *others: Path | None) -> list[Path]:
    """The files of a model that a command reads. Raises what ``find_model`` does."""
    return [find_model(name), *(other for other in others if other is not None)]


def check_outputs(outputs: Mapping[str, Path | None], read: Iterable[Path]) -> None:
    """Refuse an output that would replace a model, or another output. Raises ``InvalidArgument`` naming the flags."""
    models = {os.path.realpath(path) for path in read}
    taken: dict[str, str] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        where = os.path.realpath(path)
        if where in models:
            raise InvalidArgument(f"{flag} {str(path)!r} is the model, and stays")
        if where in taken:
            raise InvalidArgument(f"{taken[where]} and {flag} would write the same file {str(path)!r}")
        taken[where] = flag
