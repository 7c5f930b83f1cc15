"""A kernel that may begin while the one before it ends waits by itself: what is launched so is what waits.

Source: ``native/kernels/grid.cuh``. On a card a kernel that did not wait would, now and then, read what is not there.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.cuda import kernel_sources
from tests.meta.tree import ROOT, without_comments

LAUNCHERS = sorted((ROOT / "native/backends/cuda").glob("*.c"))
WAIT, BEGIN = "kvs_wait_for_previous();", "kvs_let_next_begin();"


def keys() -> dict[str, set[bool]]:
    """By source, whether launches may begin early."""
    found: dict[str, set[bool]] = {}
    for path in LAUNCHERS:
        text = without_comments(path.read_text(encoding="utf-8"))
        for source, rest in re.findall(r"\{\s*\.source = (\w+|\"\w+\"),(.*?)\};", text, re.DOTALL):
            named = [source.strip('"')] if '"' in source else re.findall(r"record_key\(\"(\w+)\"", text)
            for name in named:
                found.setdefault(name, set()).add(".waits = true" in rest)
    return found


def kernels(source: str) -> dict[str, str]:
    """The bodies of the kernels of a whole source, by name."""
    pattern = r"__global__[^{;]*?\b(\w+)\(const \w+ \w+\)\s*\{(.*?)\n\}"
    return dict(re.findall(pattern, without_comments(source), re.DOTALL))


def test_every_source_has_a_key_of_one_kind() -> None:
    assert set(keys()) == set(kernel_sources()) and all(len(kinds) == 1 for kinds in keys().values())


@pytest.mark.parametrize("name", sorted(kernel_sources()))
def test_what_may_begin_early_waits_before_it_reads(name: str) -> None:
    source = kernel_sources()[name]
    bodies = kernels(source)
    assert bodies and len(bodies) == source.count("__global__")
    for body in bodies.values():
        if keys()[name] != {True}:
            assert WAIT not in body and BEGIN not in body
        elif name == "matmul":
            # Weights are asked for before, of experts nothing.
            places = ("if (KVS_EXPERTS)", "fetch_weights", "fetch_records")
            first_wait, weights, records = (body.index(place) for place in places)
            assert first_wait < weights < body.rindex(WAIT) < records
        elif name == "delta":
            # Weights and the picture of a pass are read before; of the state lines are brought near, nothing is taken.
            calls = set(re.findall(r"(\w+)\(", body[body.index(BEGIN) + len(BEGIN) : body.index(WAIT)]))
            assert calls == {"params_of_pass", "bring_state_near", "begin_weights", "channel_of"}
            assert body.split()[0] == BEGIN and body.count(WAIT) == 1
        elif name in ("attend", "attend_mma", "attend_tile") and "params_of_pass" in body:
            # The picture of a pass is read before; of pages lines are brought near, nothing is taken.
            calls = set(re.findall(r"(\w+)\(", body[body.index(BEGIN) + len(BEGIN) : body.index(WAIT)]))
            near = {"gate_of", "place_of_block", "tile_of", "pages_of_slot", "if", "prefetch_bytes", "head_of_page"}
            assert calls <= near | {"params_of_pass"} and body.index(BEGIN) < body.index(WAIT) and body.count(WAIT) == 1
        else:
            statements = re.sub(r"__shared__ [^;]*;", "", body).split()
            assert " ".join(statements[:2]) == f"{BEGIN} {WAIT}"
