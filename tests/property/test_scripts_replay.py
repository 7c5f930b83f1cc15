"""What a state machine has done in Python, the C driver can do again: the same script, no disagreement."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("pykvstream._ffi._native")

from tests.alphabet import DRIVER, ScriptedMachine
from tests.meta.tree import ROOT
from tests.property.test_arena_machine import ArenaMachine
from tests.property.test_cache_machine import CacheMachine
from tests.property.test_layer_lease_machine import LayerLeaseMachine
from tests.property.test_pager_machine import PagerMachine
from tests.property.test_phase_machine import PhaseMachine
from tests.property.test_ring_machine import RingMachine

FEW = settings(
    max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def scripts_of(machine: type[ScriptedMachine]) -> set[bytes]:
    """Run a machine; return what its examples have reported."""
    found: set[bytes] = set()

    class Collecting(machine):  # type: ignore[misc, valid-type]
        def report_script(self) -> None:
            found.add(bytes(self.script))

    run_state_machine_as_test(Collecting, settings=FEW)
    return found


@pytest.mark.skipif(not (ROOT / DRIVER).exists(), reason="the C driver is not built (make test-native)")
@pytest.mark.parametrize(
    "machine", [ArenaMachine, CacheMachine, LayerLeaseMachine, PagerMachine, PhaseMachine, RingMachine]
)
def test_c_does_what_the_machine_did(machine: type[ScriptedMachine], tmp_path: Path) -> None:
    scripts = scripts_of(machine)
    assert len(scripts) > 5
    for number, script in enumerate(sorted(scripts)):
        (tmp_path / f"{number}").write_bytes(script)
    ran = subprocess.run([ROOT / DRIVER, machine.target, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == f"{len(scripts)} passed, 0 failed"
