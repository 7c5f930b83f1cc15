"""Promises 2 and 3 with the MTP head: it changes no token, no logit, no text, and nothing that is left behind.

A head of random weights is right as rarely as chance; heads that are right often, or never, come from a trunk that is
asked for the text beforehand (``Told``).
Units: ``room``: share of the arena between the smallest and that in which nothing streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pykvstream import Model, NgramSize, SamplingParams, Session, SpeculationParams
from pykvstream.core.tape import CancelFlag
from pykvstream.errors import FormatError, InvalidArgument, KvStreamError, Unsupported
from pykvstream.runtime import mtp_drafter
from pykvstream.runtime.mtp_drafter import top_probability
from pykvstream.runtime.saving import _records
from pykvstream.runtime.session import Chooser
from pykvstream.runtime.session_file import SECTIONS, SectionReader, write_sections
from pykvstream.runtime.target import Phase
from pykvstream.speculation import HEAD_DRAFTER
from tests.property.test_drafting_promise import CHAINS, GREEDY, HOT, PROMPT, SHAPE, WARM, Said, listen
from tests.random_hybrid import Experts, HybridShape, make_tensors, write_random_hybrid

CTX = 1024
MTP = HybridShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "n_mtp": 1})


def speculation(**more: object) -> SpeculationParams:
    return SpeculationParams(types=(HEAD_DRAFTER,), **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("mtp") / "hybrid.gguf"
    write_random_hybrid(where, MTP, 5)
    return where


@pytest.fixture(scope="module", params=["resident", "smallest"])
def model(request: pytest.FixtureRequest, path: Path) -> Iterator[Model]:
    arena = None
    if request.param == "smallest":
        with Model.open(path, threads=1, ubatch_size=64, ctx_size=CTX, mtp=True) as wide:
            arena = wide.plan.smallest_bytes / 2**20
    with Model.open(path, threads=1, ubatch_size=64, ctx_size=CTX, mtp=True, arena_mib=arena) as made:
        yield made


def as_plain(model: Model, prompts: tuple[str, ...], n_tokens: int, params: SamplingParams) -> list[Said]:
    with model.session(seed=7) as session:
        return [listen(session, prompt, n_tokens, params, ignore_eos=True) for prompt in prompts]


def what_follows(session: Session) -> bytes:
    """Logits behind the conversation, of a prompt and of a token."""
    return session.forward([1, 2, 3]).tobytes() + session.forward([4], phase=Phase.DECODE).tobytes()


@pytest.mark.parametrize("n_max", [1, 2, 3, 5, 8, "auto"])
@pytest.mark.parametrize("sampling", ["coupled", "greedy"])
@pytest.mark.parametrize("params", CHAINS)
def test_the_head_changes_no_answer_and_nothing_behind_it(
    model: Model, n_max: int | str, sampling: str, params: str
) -> None:
    prompts = PROMPT, " And then?"
    told = speculation(draft_n_max=n_max, draft_sampling=sampling)
    with model.session(seed=7) as plain, model.session(seed=7) as drafted:
        for prompt in prompts:
            expected = listen(plain, prompt, 45, CHAINS[params], ignore_eos=True)
            assert listen(drafted, prompt, 45, CHAINS[params], told, ignore_eos=True) == expected
        draft = drafted.stats.draft
        assert draft is not None and draft.rounds > (0 if n_max == "auto" else 30)
        assert len(draft.depth_histogram) <= (8 if n_max == "auto" else int(n_max)) + 1
        assert (draft.decided is not None) == (n_max == "auto")
        assert what_follows(drafted) == what_follows(plain)
    model.check_integrity()


@pytest.mark.parametrize("params", CHAINS)
def test_n_grams_come_first_and_the_head_fills_the_other_rounds(model: Model, params: str) -> None:
    both = SpeculationParams(types=(HEAD_DRAFTER, "ngram-simple"), ngram_simple=NgramSize(2, 6))
    assert both.types == ("ngram-simple", HEAD_DRAFTER)
    with model.session(seed=7) as drafted:
        found = listen(drafted, PROMPT, 80, CHAINS[params], both, ignore_eos=True)
        assert [found] == as_plain(model, (PROMPT,), 80, CHAINS[params])
        draft = drafted.stats.draft
        assert draft is not None and draft.by_drafter[HEAD_DRAFTER].rounds > 0


class Told:
    """Puts right tokens in the place of the head's choices, or wrong ones: what ``choose`` gives back decides."""

    def __init__(self, right: tuple[int, ...], shift: int) -> None:
        self.right, self.shift = right, shift

    def __call__(self, logits: np.ndarray, position: int, made: object) -> tuple[int, None]:
        right = self.right[position] if position < len(self.right) else 0
        return (right + self.shift * (position % 3)) % 320, None


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("params", CHAINS)
def test_right_and_wrong_drafts_of_the_head_change_nothing(
    model: Model, params: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.session(seed=7) as plain, model.session(seed=7) as drafted:
        expected = [listen(plain, prompt, 60, CHAINS[params], ignore_eos=True) for prompt in (PROMPT, " More.")]
        told = Told(plain.tokens, shift)
        monkeypatch.setattr(
            "pykvstream.runtime.mtp_drafter.MtpDrafter._choose", lambda self, *given: told(*given)
        )
        found = [
            listen(drafted, prompt, 60, CHAINS[params], speculation(draft_n_max=5), ignore_eos=True)
            for prompt in (PROMPT, " More.")
        ]
        assert found == expected
        draft = drafted.stats.draft
        assert draft is not None and draft.accepted > 0
        assert (draft.accepted == draft.proposed) == (shift == 0)
        assert what_follows(drafted) == what_follows(plain)


def drafts_of(session: Session, n_max: int = 4) -> list[int]:
    """What the head would draft behind the conversation and a pending token."""
    session._core.push(9)
    found: list[int] = []

    def choose(logits: np.ndarray, position: int) -> int:
        found.append(int(logits.argmax()))
        return found[-1]

    session._core.draft(n_max, choose)
    return found


def rows_of(session: Session) -> bytes:
    """Everything that the head draws on: its cache's true rows, as history has them, and the pending hidden row."""
    known = session._core._context.head
    head = session.model._target.head
    assert known is not None and head is not None
    with session._core.turn:
        n_cached = session._core.n_cached
        head.catch_up(known, session.tokens, n_cached, CancelFlag())
        head.pager.publish_wait()
        pages = b"".join(_records([known.seq], known.n_true))
        return pages + head.pending(known, n_cached).tobytes() + bytes([known.base % 251])


def test_a_second_prompt_s_first_draft_is_that_of_a_fresh_session(model: Model) -> None:
    ids = [(7 * i * i + 3) % 250 for i in range(150)]
    with model.session() as used, model.session() as fresh:
        listen(used, PROMPT, 30, WARM, speculation(), ignore_eos=True)
        used.truncate(0)
        for session in (used, fresh):
            session.forward(ids)
        assert drafts_of(used) == drafts_of(fresh)


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_rows_of_drafts_give_way_to_rows_of_what_was_said(model: Model, params: SamplingParams) -> None:
    """After any number of rounds the cache is that of a head that first hears of the whole text."""
    with model.session(seed=3) as drafted, model.session(seed=3) as silent:
        listen(drafted, PROMPT, 40, params, speculation(draft_n_max=6), ignore_eos=True)
        listen(silent, PROMPT, 40, params, ignore_eos=True)
        drafted.truncate(len(drafted.tokens))
        silent.truncate(len(silent.tokens))
        assert rows_of(drafted) == rows_of(silent)


@pytest.mark.parametrize("n_kept", [1, 63, 64, 65, 128, 139, 140])
def test_going_back_takes_the_head_along(model: Model, n_kept: int) -> None:
    """Wherever a conversation is cut, drafts are those of one that never went further."""
    ids = [(7 * i * i + 3) % 250 for i in range(140)]
    more = [(5 * i + 1) % 250 for i in range(30)]
    with model.session() as cut, model.session() as straight:
        cut._core.forward(ids, marks=(64, 128))
        drafts_of(cut)
        cut._core.truncate(n_kept, or_begin_anew=True)
        cut.forward(more)
        straight.forward([*ids[:n_kept], *more])
        assert rows_of(cut) == rows_of(straight)
        assert drafts_of(cut) == drafts_of(straight)


def test_a_fork_drafts_on_its_own(model: Model) -> None:
    with model.session(seed=3) as parent:
        listen(parent, PROMPT, 20, WARM, speculation(), ignore_eos=True)
        with parent.fork() as child, parent.fork() as other:
            alike = listen(child, " More.", 25, WARM, speculation(), ignore_eos=True)
            assert child.stats.draft is not None and child.stats.draft.rounds > 0
            assert child._chain is not parent._chain
            with model.session(seed=child.seed) as plain:
                plain.forward(list(other.tokens))
            assert listen(parent, " More.", 25, WARM, speculation(), ignore_eos=True).tokens != ()
            assert alike.conversation[: len(other.tokens)] == other.tokens
    model.check_integrity()


@pytest.mark.parametrize("n_drafted", [0, 30])
def test_a_saved_conversation_brings_along_what_the_head_knows(
    model: Model, path: Path, n_drafted: int, tmp_path: Path
) -> None:
    where = tmp_path / "session"
    with model.session(seed=3) as session:
        listen(session, PROMPT, n_drafted, WARM, speculation(), ignore_eos=True)
        session.truncate(len(session.tokens))
        session.save(where)
        with model.load_session(where) as loaded:
            assert rows_of(loaded) == rows_of(session)
            assert drafts_of(loaded) == drafts_of(session)
            again = [(5 * i + 1) % 250 for i in range(70)]
            assert loaded.forward(again).tobytes() == session.forward(again).tobytes()
            assert rows_of(loaded) == rows_of(session)
    with Model.open(path, threads=1, ubatch_size=64, ctx_size=CTX) as bare, bare.load_session(where) as loaded:
        loaded.save(where)
    with model.load_session(where) as loaded:
        loaded.forward([1, 2])
        assert len(drafts_of(loaded, 3)) == 3, "a head that finds nothing begins here"


@pytest.mark.parametrize(
    "forge",
    [
        lambda part: part[:-1],
        lambda part: part[:63],
        lambda part: part + bytes(4),
        *(lambda part, i=i: part[: 8 * i] + b"\xff" * 8 + part[8 * i + 8 :] for i in range(8)),
    ],
)
def test_a_forged_section_of_the_head_is_refused(model: Model, tmp_path: Path, forge: Callable[[bytes], bytes]) -> None:
    where = tmp_path / "session"
    with model.session(seed=3) as session:
        listen(session, PROMPT, 10, WARM, speculation(), ignore_eos=True)
        session.save(where)
    with SectionReader(where, lambda: None) as file:
        parts = {name: file.read(name).tobytes() for name in SECTIONS}
    forged = {name: [part if name != "head" else forge(part)] for name, part in parts.items()}
    write_sections(where, forged, lambda: None)
    with pytest.raises(FormatError, match=": head: "):
        model.load_session(where)
    model.check_integrity()


def test_a_draft_ends_where_the_head_is_not_sure(model: Model) -> None:
    """Above every probability nothing is drafted; in between fewer tokens are, and the text is the same."""
    proposed = []
    for p_min in (0.0, 0.3, 1.0):
        with model.session(seed=7) as session:
            found = listen(session, PROMPT, 40, GREEDY, speculation(draft_p_min=p_min), ignore_eos=True)
            draft = session.stats.draft
            assert draft is not None and [found] == as_plain(model, (PROMPT,), 40, GREEDY)
            proposed.append(draft.proposed)
    assert proposed[0] > proposed[1] > proposed[2] == 0


def test_probabilities_are_those_among_ten() -> None:
    logits = np.arange(12, dtype=np.float32)
    weights = np.exp(np.arange(2, 12) - 11.0)
    assert top_probability(logits, 11) == pytest.approx(1 / weights.sum())
    assert top_probability(logits, 2) == pytest.approx(weights[0] / weights.sum())
    assert top_probability(logits, 1) == 0.0
    assert top_probability(logits[:3], 2) == pytest.approx(1 / (1 + np.exp(-1) + np.exp(-2)))


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("every", [1, 8])
def test_the_coupled_bound_is_the_mean_overlap_of_both_distributions(
    model: Model, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Written down anew: of each token that was judged in a draft that is measured, sum(min(p, q)) by softmax."""
    monkeypatch.setattr(mtp_drafter, "SHARED_EVERY", every)
    params = SamplingParams(temperature=0.9, top_k=0, top_p=1.0, min_p=0.0)
    drafts: list[dict[int, tuple[int, np.ndarray]]] = []
    with model.session(seed=3) as session:
        drafted = session._core.draft

        def spy(n_max: int, choose: Chooser) -> None:
            told: dict[int, tuple[int, np.ndarray]] = {}
            drafts.append(told)

            def seen(logits: np.ndarray, position: int) -> int | None:
                token = choose(logits, position)
                assert token is not None
                told[position] = token, logits.copy()
                return token

            drafted(n_max, seen)

        monkeypatch.setattr(session._core, "draft", spy)
        n_prompt = len(model.tokenizer.encode(PROMPT))
        pieces = session.generate(
            PROMPT, max_tokens=120, params=params, ignore_eos=True, speculation=speculation(draft_n_max=3)
        )
        said = {n_prompt + i: (piece.token, piece.logits.copy()) for i, piece in enumerate(pieces)}
        draft = session.stats.draft
    overlaps = []
    for told in drafts[::every]:
        for position, (token, logits) in told.items():
            if position not in said:
                break
            overlaps.append(np.minimum(softmax(logits, 0.9), softmax(said[position][1], 0.9)).sum())
            if said[position][0] != token:
                break
    assert draft is not None and len(overlaps) > 10
    assert draft.coupled_bound == pytest.approx(np.mean(overlaps), rel=1e-9)
    assert 0.0 < draft.coupled_bound < 1.0


def test_without_temperature_there_is_no_coupled_bound(model: Model) -> None:
    with model.session(seed=3) as session:
        listen(session, PROMPT, 30, GREEDY, speculation(), ignore_eos=True)
        draft = session.stats.draft
    assert draft is not None and draft.rounds > 0 and draft.coupled_bound is None


def test_hidden_rows_are_those_of_each_token(model: Model) -> None:
    with model.session() as session, model.session() as parts:
        session.forward(list(range(1, 131)))
        rows = session.hidden_rows()
        assert rows.shape == (130, MTP.n_embd) and rows.dtype == np.float32
        parts.forward(list(range(1, 65)))
        parts.forward(list(range(65, 131)))
        assert parts.hidden_rows().tobytes() == rows.tobytes()
        session.forward([5], phase=Phase.DECODE)
        session.truncate(130)
        assert session.hidden_rows().tobytes() == rows.tobytes()
        session.truncate(0)
        assert session.hidden_rows().shape == (0, MTP.n_embd)


def test_hidden_rows_are_bounded_and_the_head_goes_on_from_there(model: Model) -> None:
    """What was dropped before the head saw it is a hole: it drafts from what came later, at its true positions."""
    ids = [(7 * i * i + 3) % 250 for i in range(600)]
    with model.session() as session:
        known = session._core._context.head
        assert known is not None
        known.hidden.bound = 100
        session.forward(ids)
        assert len(session.hidden_rows()) == 100
        assert len(drafts_of(session, 3)) == 3
        assert (known.base, known.end) == (500, 600)
    with model.session(seed=7) as session:
        known = session._core._context.head
        assert known is not None
        known.hidden.bound = 150
        listen(session, PROMPT, 5, GREEDY, speculation(), ignore_eos=True)
        assert known.base > 0
        session.forward(ids)
        assert known.base > 0 and known.n_behind(session._core.n_cached) <= 75 + 64, "a head at work keeps up"


def test_nothing_is_copied_while_the_layer_is_resident(path: Path) -> None:
    with Model.open(path, threads=1, ubatch_size=64, ctx_size=CTX, mtp=True) as model, model.session() as session:
        head = model._target.head
        assert head is not None
        listen(session, PROMPT, 60, GREEDY, speculation(), ignore_eos=True)
        info, stats = head.pager_info, session.stats.head
        assert stats is not None and stats.steps > 0 and stats.leases > 0
        assert (stats.leased_bytes, stats.step_bytes, stats.rounds_in_waves, stats.most_held_slots) == (0, 0, 0, 0)
        assert (info.copies, info.streamed_bytes, info.loaded_bytes) == (0, 0, 0)


def test_probabilistic_drafts_are_drawn_and_give_one_text_for_a_seed(model: Model) -> None:
    told = speculation(draft_sampling="probabilistic")
    answers = []
    for _ in range(2):
        with model.session(seed=7) as session:
            answers.append(listen(session, PROMPT, 50, WARM, told, ignore_eos=True))
            assert session.stats.draft is not None and session.stats.draft.rounds > 0
    assert answers[0] == answers[1] and len(answers[0].tokens) == 50
    with model.session(seed=7) as session:
        found = listen(session, PROMPT, 50, GREEDY, told, ignore_eos=True)
    assert [found] == as_plain(model, (PROMPT,), 50, GREEDY), "without temperature it is plain decoding"


def test_drawn_drafts_are_accepted_as_often_as_distributions_overlap(model: Model) -> None:
    """At 0.7, over some hundred judged tokens; the bound is 4 standard deviations of as many coins."""
    told = speculation(draft_sampling="probabilistic")
    params = SamplingParams(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0)
    with model.session(seed=7) as session:
        listen(session, PROMPT, 400, params, told, ignore_eos=True)
        draft, chain = session.stats.draft, session._chain
        assert draft is not None and chain is not None and draft.coupled_bound is not None
        n_judged = chain._n_judged
        assert n_judged >= draft.rounds > 100 and draft.accepted > 0
        assert abs(draft.accepted - n_judged * draft.coupled_bound) <= 2 * n_judged**0.5
    with model.session(seed=7) as session:
        listen(session, PROMPT, 60, params, speculation(), ignore_eos=True)
        draft = session.stats.draft
        assert draft is not None and draft.coupled_bound is not None and 0 < draft.coupled_bound < 1
    with model.session(seed=7) as session:
        listen(session, PROMPT, 20, SamplingParams(temperature=0), speculation(), ignore_eos=True)
        assert session.stats.draft is not None and session.stats.draft.coupled_bound is None


def test_a_model_that_was_opened_without_its_head_says_so(path: Path) -> None:
    with Model.open(path, threads=1, ubatch_size=64, ctx_size=CTX) as model, model.session() as session:
        with pytest.raises(Unsupported, match="open the model with mtp=True"):
            session.generate(PROMPT, max_tokens=3, speculation=speculation())
        with pytest.raises(Unsupported, match="open the model with mtp=True"):
            session.hidden_rows()
        assert len(listen(session, PROMPT, 3, GREEDY).tokens) == 3


SMALL = HybridShape(**{**{name: getattr(MTP, name) for name in MTP.__slots__}, "n_layers": 2})
REFUSALS: dict[str, tuple[HybridShape, dict[str, object], type[KvStreamError], str]] = {
    "no head": (HybridShape(n_layers=2, interval=2), {"mtp": True}, Unsupported, "has no MTP head"),
    "two blocks": (HybridShape(n_layers=2, interval=2, n_mtp=2), {"mtp": True}, Unsupported, "head of 2 blocks"),
    "no flag": (SMALL, {"mtp": "yes"}, InvalidArgument, "mtp must be True or False"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_no_head_is_refused_by_name(tmp_path: Path, name: str) -> None:
    shape, given, error, words = REFUSALS[name]
    write_random_hybrid(tmp_path / "m.gguf", shape)
    with pytest.raises(error, match=words):
        Model.open(tmp_path / "m.gguf", ctx_size=256, **given)  # type: ignore[arg-type]


def write_apart(folder: Path, shape: HybridShape, **keys: object) -> tuple[Path, Path]:
    """The same model in two files: the trunk alone, and the head alone."""
    block = f"blk.{shape.n_layers}."
    write_random_hybrid(folder / "whole.gguf", shape, 5)
    names = make_tensors(shape, 5)
    head = {name: None for name in names if name.startswith(block)}
    trunk = {name: None for name in names if not name.startswith(block) and name != "token_embd.weight"}
    count = {"block_count": shape.n_layers, "nextn_predict_layers": None}
    write_random_hybrid(folder / "trunk.gguf", shape, 5, tensors=head, keys=count)
    write_random_hybrid(folder / "head.gguf", shape, 5, tensors=trunk, keys=keys)  # type: ignore[arg-type]
    return folder / "trunk.gguf", folder / "head.gguf"


@pytest.mark.parametrize("experts", [None, Experts(4, 2, 32, 64)], ids=["dense", "experts"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_head_in_a_file_of_its_own_drafts_as_one_in_the_model(
    tmp_path: Path, experts: Experts | None, is_fused: bool
) -> None:
    given = {name: getattr(MTP, name) for name in MTP.__slots__} | {"experts": experts, "is_fused": is_fused}
    trunk, head = write_apart(tmp_path, HybridShape(**given))
    found = []
    for where, more in ((tmp_path / "whole.gguf", {"mtp": True}), (trunk, {"mtp_file": head})):
        with Model.open(where, threads=1, ubatch_size=64, ctx_size=CTX, **more) as model, model.session() as session:  # type: ignore[arg-type]
            session.forward(list(range(1, 100)))
            found.append((rows_of(session), drafts_of(session)))
    assert found[0] == found[1]


BAD_HEADS = {
    "another width": ({"embedding_length": 128}, FormatError, r"128, the model has 64 \(.*embedding_length"),
    "another head size": ({"attention.key_length": 64}, FormatError, r"64, the model has 32 \(.*key_length"),
    "two blocks": ({"nextn_predict_layers": 2}, Unsupported, "an MTP head of 2 blocks"),
    "none": ({"nextn_predict_layers": 0}, Unsupported, "an MTP head of 0 blocks"),
    "another depth": ({"block_count": 7}, FormatError, r"is for 6, the model has 4 \(key 'qwen35.block_count"),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_head_of_another_model_is_refused(tmp_path: Path, name: str) -> None:
    keys, error, words = BAD_HEADS[name]
    trunk, head = write_apart(tmp_path, MTP, **keys)
    with pytest.raises(error, match=words):
        Model.open(trunk, ctx_size=256, mtp_file=head)


def test_catching_up_with_a_prompt_is_told_apart_from_drafting(model: Model) -> None:
    with model.session() as session:
        session.forward([(7 * i) % 250 for i in range(140)])
        session._core.push(9)
        first = session._core.draft(2, lambda logits, position: int(logits.argmax()))
        second = session._core.draft(2, lambda logits, position: int(logits.argmax()))
        assert first > 0.0 and second == 0.0
