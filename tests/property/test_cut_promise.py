"""A model that is cut at a layer boundary has the bits of one that is whole: wherever it is cut, whatever streams.

Two CPU devices with arenas of their own stand for the CPU and a card. Compared with the whole model: logits of prompts
and of single tokens, rollback, forks, chunks that are taken anew, drafts of n-grams and of an MTP head, saved sessions,
and what is left after a fault in either part.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model, NgramSize, SpeculationParams
from pykvstream.core.device import HookPoint
from pykvstream.errors import InvalidArgument, KvStreamError, Unsupported
from pykvstream.models import ModelConfig
from pykvstream.models.span import LayerSpan, cut
from pykvstream.runtime.context import PartContext
from pykvstream.runtime.part import Part
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase
from pykvstream.speculation import HEAD_DRAFTER
from tests.cut import CutRig, cuts_of, decoded, open_cut
from tests.models import write_random_model
from tests.property.test_drafting_promise import CHAINS, PROMPT, listen
from tests.random_hybrid import Experts, HybridShape, write_random_hybrid
from tests.rigs import random_placement, tight_placement, tokens_of
from tests.stack import Fault

N_PROMPT = 700
N_STEPS = 12
SIZES = {"n_embd": 64, "head_dim": 32, "n_rot": 8, "sections": (2, 1, 1), "n_ff": 96, "state": 16, "n_vocab": 320}
DENSE = ("llama", "qwen3")
HYBRIDS = {
    "hybrid": HybridShape(n_layers=5, interval=2, n_mtp=1, **SIZES),  # type: ignore[arg-type]
    "experts": HybridShape(
        n_layers=4, interval=2, n_mtp=1, experts=Experts(4, 2, 32, 32), is_fused=True, is_tied=True, **SIZES  # type: ignore[arg-type]
    ),
}  # fmt: skip
FAMILIES = (*DENSE, *HYBRIDS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cut")
    made = {name: folder / f"{name}.gguf" for name in FAMILIES}
    for i, name in enumerate(DENSE):
        write_random_model(
            made[name], arch=name, n_layers=4, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, tied=i == 1, seed=i
        )
    for i, (name, shape) in enumerate(HYBRIDS.items()):
        write_random_hybrid(made[name], shape, i)
    return made


def told(session: TokenSession, seed: int = 1) -> bytes:
    """Logits of every row of a prompt, of single tokens, of rows that are run again behind a cut, and of a fork."""
    rows = session.forward(tokens_of(seed, N_PROMPT), logits="all").tobytes()
    rows += decoded(session, list(range(N_STEPS)))
    session.truncate(session.n_tokens - 5)
    rows += decoded(session, [3, 1, 4])
    with closing(session.fork()) as fork:
        rows += fork.forward(tokens_of(seed + 1, 90)).tobytes()
    session.truncate(N_PROMPT - 20)
    rows += session.forward(tokens_of(seed + 2, 60), logits="all").tobytes()
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_has_the_bits_of_the_whole_model(paths: dict[str, Path], family: str) -> None:
    first, *others = cuts_of(paths[family])
    with open_cut(paths[family], first, residency=(1, 1)) as whole, closing(whole.session()) as session:
        expected = told(session)
        assert whole.streamed_bytes == (0,)
    assert len(others) >= 2
    for n, gpu_layers in enumerate(others):
        residency = ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0))[n % 3]
        with open_cut(paths[family], gpu_layers, residency=residency) as rig, closing(rig.session()) as session:
            assert told(session) == expected, f"{gpu_layers} layers, resident {residency}"
            rig.target.check_integrity()
            assert [n_bytes > 0 for n_bytes in rig.streamed_bytes] == [share == 0 for share in residency]


def test_placement_of_either_part_changes_no_bit(paths: dict[str, Path]) -> None:
    with open_cut(paths["hybrid"], 0) as whole, closing(whole.session()) as session:
        expected = told(session)
    rng = random.Random(5)
    with open_cut(paths["hybrid"], 3, residency=(0.4, 0.2), threads=(2, 1)) as rig:
        for _ in range(3):
            for phase in Phase:
                rig.target.place(phase, *(random_placement(part.plan, phase, rng) for part in rig.target.parts))
            with closing(rig.session()) as session:
                assert told(session) == expected
        with pytest.raises(InvalidArgument, match="1 placements, the model has 2 parts"):
            rig.target.place(Phase.DECODE, rig.target.placement_of(Phase.DECODE))


@pytest.mark.parametrize("family", ["llama", "hybrid", "experts"])
def test_saved_sessions_go_on_wherever_a_model_is_cut(paths: dict[str, Path], family: str, tmp_path: Path) -> None:
    """Saved in the middle of a chunk, with tokens that were decoded behind it, by each cut for each other one."""
    cuts = cuts_of(paths[family])
    mtp = family != "llama"
    with ExitStack() as stack:
        models = [
            stack.enter_context(
                Model.open(
                    paths[family], gpu_layers=n or "all", threads=1, ctx_size=1024, ubatch_size=64, mtp=mtp,
                )
            )
            for n in cuts
        ]  # fmt: skip
        answers = set()
        for i, model in enumerate(models):
            with model.session(seed=3) as session:
                session.forward(tokens_of(4, 300), logits="none")
                for token in (5, 6, 7):
                    session.forward([token], phase=Phase.DECODE)
                session.save(tmp_path / f"{i}.session")
        for i in range(len(cuts)):
            for model in models[:: 1 if i == 0 else 2]:
                with model.load_session(tmp_path / f"{i}.session") as session:
                    hidden = session.hidden_rows().tobytes() if mtp else b""
                    token = session.forward([8], phase=Phase.DECODE).tobytes()
                    answers.add(hidden + token + session.forward(tokens_of(9, 40)).tobytes())
        assert len(answers) == 1
        files = {(tmp_path / f"{i}.session").read_bytes() for i in range(len(cuts))}
        assert len(files) == 1, "a file tells of no cut"


@pytest.mark.parametrize("kind", ["ngram-simple", HEAD_DRAFTER])
@pytest.mark.parametrize("chain", CHAINS)
def test_drafts_change_nothing_where_a_model_is_cut(paths: dict[str, Path], kind: str, chain: str) -> None:
    params = CHAINS[chain]
    speculation = SpeculationParams(types=(kind,), ngram_simple=NgramSize(1, 6))
    with (
        Model.open(paths["hybrid"], threads=1, ctx_size=1024, ubatch_size=64, mtp=True) as whole,
        whole.session(seed=7) as session,
    ):
        expected = listen(session, PROMPT, 40, params, ignore_eos=True)
    with Model.open(
        paths["hybrid"], gpu_layers=2, cpu_arena_mib=2, threads=1, ctx_size=1024, ubatch_size=64, mtp=True
    ) as model:
        with model.session(seed=7) as session:
            assert listen(session, PROMPT, 40, params, speculation, ignore_eos=True) == expected
            assert session.stats.draft is not None and session.stats.draft.proposed > 0
        model.check_integrity()


@pytest.fixture(scope="module")
def streaming(paths: dict[str, Path]) -> Iterator[CutRig]:
    with open_cut(paths["hybrid"], 2, residency=(0.0, 0.0)) as rig:
        rig.target.place(Phase.DECODE, *(tight_placement(part.plan, Phase.DECODE) for part in rig.target.parts))
        yield rig


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("point", [HookPoint.OP, HookPoint.COPY, HookPoint.ALLOC])
@pytest.mark.parametrize("at", [0, 1])
def test_a_fault_in_either_part_loses_nothing(streaming: CutRig, phase: Phase, point: HookPoint, at: int) -> None:
    """Each fault in turn, until the call meets no more of them."""
    rows = [5] if phase is Phase.DECODE else tokens_of(8, 200).tolist()
    with closing(streaming.session()) as session:
        session.forward(tokens_of(6, 600), logits="none")
        decoded(session, [1, 2])
        with closing(session.fork()) as fork:
            expected = fork.forward(rows, phase=phase).tobytes() + decoded(fork, [9])
        n_faults, step = 0, 1
        while True:
            fault = Fault(point, n_faults * step)
            streaming.devices[at].set_hook(fault)
            try:
                session.forward(rows, phase=phase)
            except KvStreamError:
                pass
            else:
                break
            finally:
                streaming.devices[at].set_hook(None)
            assert session.n_tokens == 602 and fault.fired
            streaming.target.check_integrity()
            session.truncate(602)
            n_faults, step = n_faults + 1, 7
        assert n_faults > 0 or point is HookPoint.ALLOC
        session.truncate(602)
        assert session.forward(rows, phase=phase).tobytes() + decoded(session, [9]) == expected


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("family", ["llama", "hybrid"])
@pytest.mark.parametrize("step", ["end", "accept"])
@pytest.mark.parametrize("strikes", [1, 2])
def test_an_interrupt_between_the_parts_loses_nothing(
    paths: dict[str, Path], family: str, phase: Phase, step: str, strikes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part has committed its rows, or its state has accepted them, and the second has not; a second interrupt
    keeps what would mend that from beginning."""
    rows = [5] if phase is Phase.DECODE else tokens_of(8, 200).tolist()
    with open_cut(paths[family], 2, residency=(0.0, 0.0)) as rig, closing(rig.session()) as session:
        session.forward(tokens_of(6, 400), logits="none")
        with closing(session.fork()) as fork:
            expected = fork.forward(rows, phase=phase).tobytes() + decoded(fork, [9])
        last = rig.target.parts[-1]
        owner, own = (Part, last) if step == "end" else (PartContext, session._context.parts[-1])
        plain = getattr(owner, step)

        def interrupt(this: object, n_rows: int) -> None:
            if this is own:
                raise KeyboardInterrupt
            plain(this, n_rows)

        def interrupt_again(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(owner, step, interrupt)
            if strikes == 2:
                patched.setattr(type(rig.target), "restore", interrupt_again)
            with pytest.raises(KeyboardInterrupt):
                session.forward(rows, phase=phase)
        # Rows that a state has not accepted are given up where the pass ends.
        is_apart = strikes == 2 and (step == "end") == (family == "llama")
        assert session._context.is_together != is_apart
        assert session.n_tokens == 400
        assert session.forward(rows, phase=phase).tobytes() + decoded(session, [9]) == expected
        rig.target.check_integrity()


def test_budget_for_checkpoints_is_one_for_both_parts(paths: dict[str, Path]) -> None:
    with open_cut(paths["hybrid"], 0) as whole:
        slot = whole.target.parts[0].blueprint.slot_bytes
    with open_cut(paths["hybrid"], 2, checkpoint_bytes=3 * slot) as rig:
        assert [part.blueprint.checkpoint_slots for part in rig.target.parts] == [3, 3]
        assert sum(part.blueprint.checkpoint_bytes for part in rig.target.parts) == 3 * slot


def test_numbers_of_layers_as_llama_cpp_counts_them(paths: dict[str, Path]) -> None:
    with Model.open(paths["llama"], ctx_size=256) as model:
        config: ModelConfig = model.config
    whole = LayerSpan(0, 4, 4)
    assert cut(config, 0) == (whole, None)
    assert {cut(config, n) for n in (4, 5, 99, "all", "auto")} == {(None, whole)}
    assert cut(config, 3) == (LayerSpan(0, 1, 4), LayerSpan(1, 4, 4))
    for wrong in (-1, True, 1.5, "half"):
        with pytest.raises(InvalidArgument, match="gpu_layers must be an integer of at least 0"):
            cut(config, wrong)  # type: ignore[arg-type]


def test_parts_without_keys_and_values_are_refused_by_name(paths: dict[str, Path]) -> None:
    """The hybrid attends in layers 1 and 3 of 5."""
    for gpu_layers, words in (
        (4, r"gpu_layers 4 leaves layer 0 on the CPU, and none with keys and values; supported: 2 to 3, 0 or all"),
        (1, r"gpu_layers 1 leaves layer 4 on the device, and none with keys and values; supported: 2 to 3, 0 or all"),
    ):
        with pytest.raises(Unsupported, match=words):
            Model.open(paths["hybrid"], gpu_layers=gpu_layers)


def test_parts_are_told_and_arenas_are_bounds(paths: dict[str, Path]) -> None:
    with Model.open(
        paths["llama"], gpu_layers=1, arena_mib=2, cpu_arena_mib=3, threads=1, ctx_size=512, ubatch_size=64
    ) as model:
        first, last = model.parts
        assert (first.span, last.span) == (LayerSpan(0, 3, 4), LayerSpan(3, 4, 4))
        assert (first.plan.arena_bytes, last.plan.arena_bytes) == (3 << 20, 2 << 20)
        assert model.plan == last.plan and model.report == last.report
        with model.session() as session:
            session.forward(tokens_of(1, 300), logits="none")
            assert session.stats.arena_bytes == 5 << 20
            for part in model._target.parts:
                report = part.report
                assert part.device.info.device_peak_bytes == report.arena_bytes + report.weight_bytes
    with pytest.raises(InvalidArgument, match="cpu_arena_mib is for layers that stay on the CPU"):
        Model.open(paths["llama"], cpu_arena_mib=3)
    with Model.open(paths["llama"], gpu_layers=0, device="cuda:7", arena_mib=4, ctx_size=512) as model:
        assert [part.device for part in model.parts] == ["cpu"] and model.plan.arena_bytes == 4 << 20


def test_weights_lie_where_their_layers_are(paths: dict[str, Path]) -> None:
    """The embedding with the first layers, the output with the last; nothing twice but what is tied."""
    with Model.open(paths["llama"], ctx_size=256) as model:
        whole = model.report.weight_bytes
    names: dict[str, int] = {}

    def count(name: str, _n_bytes: int) -> None:
        names[name] = names.get(name, 0) + 1

    with Model.open(paths["llama"], gpu_layers=2, ctx_size=256, progress=count) as model:
        assert sum(part.report.weight_bytes for part in model.parts) == whole
    assert set(names.values()) == {1}


def test_hidden_rows_cross_as_they_are(paths: dict[str, Path]) -> None:
    """What the first part hands over is the residual stream of the whole model: not rounded, not reordered."""
    with open_cut(paths["qwen3"], 2) as rig, closing(rig.session()) as session:
        session.forward(tokens_of(2, 100), logits="none")
        handed = rig.target.parts[0]._handed_over
        assert handed.dtype == np.float32 and handed.shape[1] == rig.target.blueprint.config.n_embd
        assert np.isfinite(handed[:100]).all() and (handed[:100] != 0).any()
