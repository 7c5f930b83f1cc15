"""What a fork of a conversation shares with its parent, and what it never does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.device import HookPoint
from pykvstream.errors import DeviceError
from pykvstream.runtime.target import Phase
from pykvstream.sampling import fork_seed
from tests.models import write_random_model
from tests.stack import Fault, Stack, open_stack

PROMPT = [7] * 300


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path: Path = tmp_path_factory.mktemp("forks") / "model.gguf"
    write_random_model(path, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, ctx=2048, seed=3)
    with open_stack(path) as made:
        yield made


def test_every_fork_has_a_seed_of_its_own(stack: Stack) -> None:
    with stack.model.session(seed=5) as parent:
        first, second = parent.fork(), parent.fork()
        grandchild = first.fork()
        assert [first.seed, second.seed] == [fork_seed(5, 1), fork_seed(5, 2)]
        assert grandchild.seed == fork_seed(first.seed, 1)
        assert len({each.seed for each in (parent, first, second, grandchild)}) == 4
        for each in (grandchild, second, first):
            each.close()


def test_a_fork_is_refused_while_history_does_not_take_what_it_would_share(stack: Stack) -> None:
    """Else its parent could end, and with it the only rows there are."""
    with stack.model.session() as parent:
        parent.forward(PROMPT, logits="none")
        parent.forward([1], phase=Phase.DECODE, logits="none")
        stack.device.drain()  # what came before is in history
        with stack.fault(Fault(HookPoint.COPY, 0, 10**6)):
            parent.forward([1], phase=Phase.DECODE, logits="none")
            with pytest.raises(DeviceError):
                parent.fork()
        with parent.fork() as child:
            assert child.tokens == parent.tokens
