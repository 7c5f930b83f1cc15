"""Values of flags: text to numbers, refused with what is needed.

Holds: converters for ``argparse``; each raises ``ArgumentTypeError``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from pykvstream.eval.facts import evenly
from pykvstream.models.span import ALL_LAYERS

_MOST_MIB = 2**40


def integer(least: int, most: int = 2**31 - 1, why: str | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"need an integer, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(why or f"need an integer from {least} to {most}, got {value}")
        return value

    return convert


def positive() -> Callable[[str], int]:
    return integer(1)


def architectures(text: str) -> tuple[int, ...]:
    """``sm_90`` or ``sm_80,sm_90``; the prefix may be left out."""
    found = [re.fullmatch(r"(?:sm_)?(\d{2,3})", part.strip()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"need architectures such as sm_90 or sm_80,sm_90, got {text!r}")
    return tuple(dict.fromkeys(int(match[1]) for match in found if match is not None))


def real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"need a finite number, got {text!r}")
    return value


def probability(text: str) -> float:
    """A number from 0 to 1."""
    value = real(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"need a number from 0 to 1, got {text}")
    return value


def arena(text: str) -> float:
    value = math.inf if text.strip().lower().lstrip("+") in ("inf", "infinity") else real(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"need a size above 0 MiB, got {text}; left out, the arena suits the context")
    if value >= _MOST_MIB:
        raise argparse.ArgumentTypeError(f"need a size below {_MOST_MIB} MiB, got {text}")
    return value


def seconds(text: str) -> float:
    value = real(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"need more than 0 seconds, got {text}")
    return value


def gpu_layers(text: str) -> int | str:
    word = text.strip().lower()
    if word in ALL_LAYERS:
        return word
    try:
        value = int(word)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"need a number of layers from 0 on, or all, got {text!r}")
    return value


def budget(text: str) -> float:
    value = real(text)
    if not 0 <= value < _MOST_MIB:
        raise argparse.ArgumentTypeError(f"need a size from 0 to below {_MOST_MIB} MiB, got {text}")
    return value


def contexts(text: str) -> tuple[int, ...]:
    check = integer(1)
    return tuple(check(part) for part in text.split(","))


def percent(text: str) -> float:
    value = real(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"need a share above 0 and up to 100 percent, got {text}")
    return value


def percents(text: str) -> tuple[float, ...]:
    return tuple(percent(part) for part in text.split(","))


def depths(text: str) -> tuple[Fraction, ...]:
    """A number of depths, or a list of them in percent."""
    if "," not in text and "%" not in text:
        return evenly(integer(1, 1000)(text))
    found = []
    for part in text.split(","):
        value = real(part.strip().removesuffix("%"))
        if not 0 <= value <= 100:
            raise argparse.ArgumentTypeError(f"need a number of depths, or depths from 0 to 100 percent, got {text!r}")
        found.append(Fraction(value) / 100)
    return tuple(found)


def names(known: Sequence[str] | None = None) -> Callable[[str], tuple[str, ...]]:
    def convert(text: str) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(","))
        for part in parts:
            if part == "" or (known is not None and part not in known):
                choices = f" of {', '.join(known)}" if known is not None else ""
                raise argparse.ArgumentTypeError(f"need names{choices} between commas, got {text!r}")
        return parts

    return convert


def bias(text: str) -> tuple[int, float]:
    found = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|-inf)", text, re.ASCII | re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"need a token id and what to add, as in 15043+1 or 15043-inf, got {text!r}")
    return int(found[1]), float(found[2])


def json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"need a JSON object, got {text!r}")
    return value
