"""The one action alphabet, in Python: what state machines report while they act, as a script that C replays.

Every byte string is a script: an opcode byte, then as many operand bytes as the action has. ``fuzz/alphabet.def`` is
the same table in C, ``fuzz/script_*.c`` say what operands mean in each world. A machine reports each action before it
takes it, and at the end, where it has failed, prints the script with the command that replays it.
Holds: ``ACTIONS``, ``encode``, ``u16``, ``replay_command``, ``ScriptedMachine``.
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine

ACTIONS = {
    "CREATE": 4,
    "BEGIN": 3,
    "RESERVE": 5,
    "COMMIT": 3,
    "ABORT": 0,
    "STOP": 0,
    "GO": 0,
    "ACQUIRE": 1,
    "CLAIM": 1,
    "RETIRE": 2,
    "RELEASE": 2,
    "CLOSE": 1,
    "ADVANCE": 2,
    "APPEND": 3,
    "TRUNCATE": 3,
    "FORK": 2,
    "WRITE": 5,
    "READ": 1,
    "PLAN": 6,
    "PREFETCH": 10,
    "CONSUME": 1,
    "HOLD": 1,
    "PLACE": 5,
    "BIND": 1,
    "UNBIND": 1,
    "RECORD": 10,
    "RUN": 1,
    "PHASE": 1,
    "ADMIT": 0,
    "FINISH": 1,
    "CANCEL": 1,
    "FAIL": 3,
    "LEASE": 4,
    "GIVE_BACK": 1,
}
"""Operand bytes of each action; its place is its opcode."""

OPCODES = {name: opcode for opcode, name in enumerate(ACTIONS)}
DRIVER = "build/native/fuzz/regress"


def u16(number: int) -> tuple[int, int]:
    """Two operands that hold one number."""
    return number & 0xFF, number >> 8


def encode(name: str, *operands: int) -> bytes:
    """One action as bytes; operands that are left out are 0."""
    missing = ACTIONS[name] - len(operands)
    if missing < 0:
        raise ValueError(f"{name} has {ACTIONS[name]} operands, not {len(operands)}")
    return bytes([OPCODES[name], *operands]) + bytes(missing)


def replay_command(target: str, script: bytes) -> str:
    """How to act a script out in C, printing every step (``make test-native`` builds the driver)."""
    return f"{DRIVER} {target} --hex {script.hex()}"


class ScriptedMachine(RuleBasedStateMachine):
    """A state machine that says what it does. ``target`` is the world in C that can do the same."""

    target: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.script = bytearray()

    def act(self, name: str, *operands: int) -> None:
        """Report the next action, before it is taken."""
        self.script += encode(name, *operands)

    def report_script(self) -> None:
        """To be called first in ``teardown``; printed only for the smallest example that fails."""
        note(f"the same in C: {replay_command(self.target, bytes(self.script))}")
