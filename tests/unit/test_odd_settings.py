"""Settings that are none: refused by name, whatever they are."""

from __future__ import annotations

import pytest

from pykvstream import SamplingParams
from pykvstream.errors import InvalidArgument


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 10**400),
        ("min_p", -(10**400)),
        ("logit_bias", 5),
        ("logit_bias", [(1, 2.0)]),
        ("dry_breakers", 5),
        ("dry_breakers", "12"),
    ],
)
def test_what_is_no_setting_at_all_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
