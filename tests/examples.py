"""How many examples a property draws: its own number in `make test`, many times that in `make deep`."""

from __future__ import annotations

from hypothesis import settings

DEEP_FACTOR = 40
"""What makes the deep profile about an hour on two cores."""


def examples(n: int) -> int:
    """``n``, or :data:`DEEP_FACTOR` times as many where ``--hypothesis-profile=deep`` is in force."""
    return n * DEEP_FACTOR if settings.get_current_profile_name() == "deep" else n
