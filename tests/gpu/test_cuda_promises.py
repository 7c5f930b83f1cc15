"""The promises on a card: placement, width and repetition change no bit; and what it computes is what the CPU computes.

Each with itself to the bit; card against CPU within what float32 sums in another order differ by.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.engine import Model, Session
from pykvstream.gguf import TYPES_BY_ID
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from tests.models import write_random_model
from tests.random_hybrid import Experts, HybridShape, write_random_hybrid

CTX = 3000
PROMPT = 2500
STEPS = 24
TYPES = {kind.name: kind for kind in TYPES_BY_ID.values()}

Logits = npt.NDArray[np.float32]


def prompt_of(n_vocab: int, n_tokens: int = PROMPT) -> list[int]:
    rng = np.random.default_rng(7)
    return [int(token) for token in rng.integers(0, n_vocab, n_tokens)]


def run(session: Session, n_vocab: int, n_tokens: int, n_steps: int) -> Logits:
    """Logits of a prompt's last row and of greedy steps behind it, ``[1 + n_steps, n_vocab]``."""
    rows = [session.forward(prompt_of(n_vocab, n_tokens)).copy().reshape(-1)]
    for _ in range(n_steps):
        row = session.forward([int(rows[-1].argmax())], phase=Phase.DECODE)
        rows.append(row.copy().reshape(-1))
    return np.stack(rows)


def decode(model: Model, n_tokens: int = PROMPT, n_steps: int = STEPS) -> Logits:
    with model.session() as session:
        return run(session, model.config.n_vocab, n_tokens, n_steps)


def digest(logits: Logits) -> str:
    return hashlib.sha256(logits.tobytes()).hexdigest()


def open_on(card: str, path: str | Path, arena_mib: float | None = None, **options: object) -> Model:
    settings: dict[str, object] = {"ctx_size": CTX, "cache_type_k": "q8_0", "cache_type_v": "q4_0"} | options
    return Model.open(path, device=card, arena_mib=arena_mib, **settings)  # type: ignore[arg-type]


def smallest_mib(card: str, path: str | Path) -> float:
    with open_on(card, path) as model:
        return model.plan.smallest_bytes / 2**20


@pytest.fixture(scope="session", params=["dense", "demo-hybrid", "experts"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model by name: random ones are written."""
    name: str = request.param
    path = tmp_path_factory.mktemp("models") / f"{name}.gguf"
    if name == "dense":
        write_random_model(
            path, n_layers=4, n_embd=576, n_heads=9, n_kv_heads=3, n_ff=1536, n_vocab=2048, ctx=4096,
            weight_type=TYPES["Q4_1"],
        )  # fmt: skip
    elif name == "experts":
        shape = HybridShape(n_layers=4, experts=Experts(), weight_type=TYPES["Q8_0"])
        write_random_hybrid(path, shape)
    else:
        return name
    return str(path)


def test_placement_changes_no_bit(card: str, model_path: str) -> None:
    with open_on(card, model_path) as model:
        resident = decode(model)
        assert model.plan.phase("decode").is_fully_resident
    assert np.isfinite(resident).all() and resident.std() > 0.1
    for share in (1.0, 1.25, 1.6):
        with open_on(card, model_path, smallest_mib(card, model_path) * share + 0.01) as model:
            assert digest(decode(model)) == digest(resident), share


@pytest.mark.parametrize("ring_slots", [1, 2, 5])
def test_streaming_changes_no_bit(card: str, model_path: str, ring_slots: int) -> None:
    """Of each layer all but the pages that a pass needs at least go through the ring, in both phases."""
    with open_on(card, model_path) as model:
        resident = decode(model)
    with open_on(card, model_path) as model:
        for phase in Phase:
            layout = model.plan.phases[phase.value]
            floors = (layout.pool.floor_pages,) * layout.pool.n_layers
            model.place(phase, Placement(floors, ring_slots, layout.max_rows))
        with model.session() as session:
            streamed = run(session, model.config.n_vocab, PROMPT, STEPS)
            assert session.stats.streamed_bytes > 0
        model.check_integrity()
    assert digest(streamed) == digest(resident)


def test_width_changes_no_bit(card: str, model_path: str) -> None:
    with open_on(card, model_path) as model, model.session() as alone:
        tokens = prompt_of(model.config.n_vocab, 700)
        alone.forward(tokens[:600])
        rows = [alone.forward([token], phase=Phase.DECODE).copy().reshape(-1) for token in tokens[600:664]]
        for width in (2, 3, 5, 8, 16, 49, 64):
            with model.session() as wide:
                wide.forward(tokens[:600])
                got = wide.forward(tokens[600 : 600 + width], phase=Phase.DECODE, logits="all")
                assert digest(got.copy()) == digest(np.stack(rows[:width])), width


def test_repetition_changes_no_bit(card: str, model_path: str) -> None:
    with open_on(card, model_path) as model:
        assert digest(decode(model)) == digest(decode(model))


def logits_on(device: str, path: str | Path, kind: str) -> Logits:
    """Of 560 rows of a prompt and 40 of a verify pass, ``[600, n_vocab]``."""
    with open_on(device, path, cache_type_k=kind, cache_type_v=kind) as model, model.session() as session:
        tokens = prompt_of(model.config.n_vocab, 600)
        prompt = session.forward(tokens[:560], logits="all").copy()
        return np.concatenate([prompt, session.forward(tokens[560:], phase=Phase.DECODE, logits="all")])


def difference(cpu: Logits, gpu: Logits) -> tuple[npt.NDArray[np.float32], float]:
    """Root mean square of each row's difference over the deviation of logits, and how often both choose the same."""
    by_row = np.sqrt(((cpu - gpu) ** 2).mean(axis=1)) / cpu.std()
    same = float((cpu.argmax(axis=1) == gpu.argmax(axis=1)).mean())
    print(f"rows differ by {np.median(by_row):.2e}, first {by_row[0]:.2e}, at most {by_row.max():.2e}; same {same:.4f}")
    return by_row, same


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_card_and_cpu_agree_of_quantized_weights(card: str, model_path: str, kind: str) -> None:
    """The CPU quantizes activations of a prompt, a card with products of bfloat16 rounds them. And a value that rounds
    otherwise in its last bit can fall on the other side of a code's boundary, and later layers carry that on.
    """
    by_row, same = difference(logits_on("cpu", model_path, kind), logits_on(card, model_path, kind))
    has_experts = model_path.endswith("experts.gguf")  # a router's choice is such a boundary too
    assert float(np.median(by_row)) < (0.06 if has_experts else 0.03) and same >= (0.85 if has_experts else 0.95)


def test_card_and_cpu_agree_closely_where_nothing_is_quantized(card: str, tmp_path: Path) -> None:
    write_random_model(tmp_path / "plain.gguf", n_layers=4, n_embd=512, n_heads=8, n_kv_heads=2, ctx=CTX)
    by_row, same = difference(*(logits_on(device, tmp_path / "plain.gguf", "f32") for device in ("cpu", card)))
    assert float(by_row.max()) < 1e-4 and same == 1.0
