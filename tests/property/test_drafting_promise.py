"""Promises 2 and 3: no drafter changes a token, a logit, the text, or what the conversation leaves behind.

Units: ``room`` MiB beside the smallest arena.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvstream import Model, ModSize, NgramSize, SamplingParams, Session, SpeculationParams
from pykvstream.core.state import CHUNK_TOKENS
from pykvstream.errors import Busy, InvalidArgument
from pykvstream.runtime.target import Phase
from pykvstream.speculation import DRAFTERS, Chain
from tests.examples import examples
from tests.models import write_random_model
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.scripted_drafter import RULES, Rule, Scripted, all_right, all_wrong, half_right

SHAPE = HybridShape(
    n_layers=4, interval=2, n_embd=64, head_dim=32, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=320
)
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7, repeat_penalty=1.1, frequency_penalty=0.1, dry_multiplier=0.5)
HOT = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, xtc_probability=0.3)
CHAINS = {"greedy": GREEDY, "warm": WARM, "hot": HOT}
SMALL = {
    "ngram_simple": NgramSize(1, 6),
    "ngram_map_k": NgramSize(1, 20),
    "ngram_map_k4v": NgramSize(1, 6, 1),
    "ngram_mod": ModSize(1, 1, 40),
}
SPECULATION = SpeculationParams(types=("ngram-simple",))
CTX = 1024
PROMPT = "the end of the thing and the end of the thing and the other thing, and so on and on and on. " * 3


@dataclass(frozen=True)
class Said:
    """All that can be seen of an answer."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    logits: str
    stop_reason: str | None
    conversation: tuple[int, ...]


def listen(
    session: Session,
    prompt: str,
    n_tokens: int,
    params: SamplingParams,
    speculation: SpeculationParams | None = None,
    **more: object,
) -> Said:
    digest = hashlib.sha256()
    pieces = []
    for piece in session.generate(prompt, max_tokens=n_tokens, params=params, speculation=speculation, **more):  # type: ignore[arg-type]
        digest.update(piece.logits.tobytes())
        pieces.append(piece)
    return Said(
        tuple(piece.token for piece in pieces),
        "".join(piece.text for piece in pieces),
        tuple(piece.logprob for piece in pieces),
        digest.hexdigest(),
        session.stop_reason,
        session.tokens,
    )


def put(session: Session, drafter: Scripted) -> SpeculationParams:
    """Let a drafter of the test's own draft in this session."""
    session._speculation, session._chain = SPECULATION, Chain([drafter])
    return SPECULATION


def left_behind(session: Session, folder: Path) -> bytes:
    """The whole conversation as a file: tokens, pages, recurrent state with all rows folded in."""
    session.truncate(len(session.tokens))
    state = session._core._context.parts[0].state
    if state is not None:
        state.fold()
    session.save(folder / "session")
    return (folder / "session").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("drafting")
    write_random_model(where / "llama", n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, n_ff=64, ctx=CTX, seed=1)
    write_random_hybrid(where / "hybrid", SHAPE, 5)
    return where


def open_model(folder: Path, name: str, arena_mib: float | None = None) -> Model:
    return Model.open(folder / name, threads=1, ubatch_size=64, ctx_size=CTX, arena_mib=arena_mib)


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def model(request: pytest.FixtureRequest, folder: Path) -> object:
    with open_model(folder, request.param) as made:
        yield made


def smallest_mib(model: Model) -> float:
    return model.plan.smallest_bytes / 2**20


@pytest.mark.parametrize("types", [*[(name,) for name in DRAFTERS], DRAFTERS], ids="+".join)
@pytest.mark.parametrize("sampling", ["coupled", "greedy"])
@pytest.mark.parametrize("params", CHAINS)
def test_no_drafter_changes_an_answer_or_what_it_leaves_behind(
    model: Model, types: tuple[str, ...], sampling: str, params: str, tmp_path: Path
) -> None:
    speculation = SpeculationParams(types=types, draft_sampling=sampling, **SMALL)  # type: ignore[arg-type]
    with model.session(seed=7) as plain, model.session(seed=7) as drafted:
        for prompt, n_tokens in ((PROMPT, 90), (" And then?", 40)):
            expected = listen(plain, prompt, n_tokens, CHAINS[params], ignore_eos=True)
            assert listen(drafted, prompt, n_tokens, CHAINS[params], speculation, ignore_eos=True) == expected
        assert left_behind(drafted, tmp_path) == left_behind(plain, tmp_path)
        draft = drafted.stats.draft
        assert draft is not None and draft.rounds > 0, "nothing was drafted: the test shows nothing"
        assert drafted.stats.decode_tokens == plain.stats.decode_tokens
        assert drafted.stats.history_bytes == plain.stats.history_bytes
    model.check_integrity()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", CHAINS)
def test_no_proposal_changes_an_answer(
    model: Model, rule: Rule, params: str, tmp_path: Path
) -> None:
    with model.session(seed=3) as plain, model.session(seed=3) as drafted:
        expected = listen(plain, PROMPT, 150, CHAINS[params], ignore_eos=True)
        speculation = put(drafted, Scripted(plain.tokens, rule))
        assert listen(drafted, PROMPT, 150, CHAINS[params], speculation, ignore_eos=True) == expected
        assert left_behind(drafted, tmp_path) == left_behind(plain, tmp_path)
        draft = drafted.stats.draft
        assert draft is not None and draft.rounds > 0
        if rule is all_right:
            assert draft.accepted == draft.proposed
        if rule is all_wrong:
            assert draft.accepted == 0


def test_300_rounds_of_rejected_drafts_leave_the_bits_of_plain_decoding(model: Model, tmp_path: Path) -> None:
    """Each round gives one token and drops its draft again."""
    n_tokens = 301
    with model.session(seed=9) as plain, model.session(seed=9) as drafted:
        expected = listen(plain, PROMPT, n_tokens, WARM, ignore_eos=True)
        speculation = put(drafted, Scripted(plain.tokens, all_wrong))
        assert listen(drafted, PROMPT, n_tokens, WARM, speculation, ignore_eos=True) == expected
        draft = drafted.stats.draft
        assert draft is not None and draft.accepted == 0
        # The last token needs no draft: there is no room for it.
        assert draft.rounds == n_tokens - 2
        assert left_behind(drafted, tmp_path) == left_behind(plain, tmp_path)


@settings(max_examples=examples(25))
@given(
    rule=st.sampled_from(RULES),
    params=st.sampled_from(sorted(CHAINS)),
    seed=st.integers(0, 2**32),
    n_tokens=st.integers(1, 70),
    hybrid=st.booleans(),
    room=st.sampled_from((0.0, 0.04)),
)
def test_a_small_arena_changes_nothing_either(
    folder: Path, rule: Rule, params: str, seed: int, n_tokens: int,
    hybrid: bool, room: float,
) -> None:  # fmt: skip
    name = "hybrid" if hybrid else "llama"
    with open_model(folder, name) as large:
        arena = smallest_mib(large) + room
        with open_model(folder, name, arena) as small, large.session(seed=seed) as plain:
            prompt = PROMPT * 5
            expected = listen(plain, prompt, n_tokens, CHAINS[params])
            with small.session(seed=seed) as drafted:
                speculation = put(drafted, Scripted(plain.tokens, rule))
                assert listen(drafted, prompt, n_tokens, CHAINS[params], speculation) == expected
                assert room > 0 or drafted.stats.streamed_bytes > 0
            small.check_integrity()


def test_sessions_that_take_turns_draft_each_their_own(model: Model) -> None:
    seeds = (1, 2, 3)
    prompts = [PROMPT[i:] for i in seeds]
    speculation = SpeculationParams(types=DRAFTERS, **SMALL)  # type: ignore[arg-type]
    expected = []
    for seed, prompt in zip(seeds, prompts, strict=True):
        with model.session(seed=seed) as session:
            expected.append(listen(session, prompt, 60, WARM, ignore_eos=True).tokens)
    sessions = [model.session(seed=seed) for seed in seeds]
    answers = [
        session.generate(prompt, max_tokens=60, params=WARM, ignore_eos=True, speculation=speculation)
        for session, prompt in zip(sessions, prompts, strict=True)
    ]
    said = [tuple(piece.token for piece in pieces) for pieces in zip(*answers, strict=True)]
    assert list(zip(*said, strict=True)) == expected
    for session in sessions:
        session.close()


@pytest.mark.parametrize("at", [1, 2, 5, 20])
def test_between_two_tokens_the_conversation_is_what_was_said(model: Model, at: int, tmp_path: Path) -> None:
    """Forked, saved and gone on with in the middle of a draft: as without one."""
    with model.session(seed=4) as plain, model.session(seed=4) as drafted:
        expected = listen(plain, PROMPT, 60, WARM, ignore_eos=True)
        speculation = put(drafted, Scripted(plain.tokens, all_right))
        pieces = drafted.generate(PROMPT, max_tokens=60, params=WARM, ignore_eos=True, speculation=speculation)
        said = [next(pieces).token for _ in range(at)]
        n_said = len(plain.tokens) - 60 + at
        assert drafted.tokens == plain.tokens[:n_said]
        with drafted.fork() as child, model.session(seed=4) as alike:
            listen(alike, PROMPT, at, WARM, ignore_eos=True)
            assert child.tokens == drafted.tokens
            assert child.forward([1, 2, 3]).tobytes() == alike.forward([1, 2, 3]).tobytes()
        drafted.save(tmp_path / "middle")
        with model.load_session(tmp_path / "middle") as loaded:
            assert loaded.tokens == plain.tokens[:n_said]
        said += [piece.token for piece in pieces]
        assert tuple(said) == expected.tokens


def test_an_answer_that_is_dropped_in_a_draft_leaves_what_was_said(model: Model, tmp_path: Path) -> None:
    with model.session(seed=4) as plain, model.session(seed=4) as drafted:
        listen(plain, PROMPT, 60, GREEDY, ignore_eos=True)
        right = plain.tokens
        pieces = drafted.generate(
            PROMPT, max_tokens=60, params=GREEDY, ignore_eos=True, speculation=put(drafted, Scripted(right, all_right))
        )
        for _ in range(7):
            next(pieces)
        n_tokens = len(drafted.tokens)
        with model.session(seed=4) as alike:
            listen(alike, PROMPT, 7, GREEDY, ignore_eos=True)
            assert left_behind(drafted, tmp_path) == left_behind(alike, tmp_path)
            assert drafted.tokens == right[:n_tokens]
        with pytest.raises(Busy):
            next(pieces)


def test_an_answer_that_is_dropped_in_a_draft_goes_on_as_without_one(model: Model) -> None:
    with model.session(seed=4) as plain, model.session(seed=4) as drafted, model.session(seed=4) as alike:
        listen(plain, PROMPT, 60, GREEDY, ignore_eos=True)
        speculation = put(drafted, Scripted(plain.tokens, all_right))
        pieces = drafted.generate(PROMPT, params=GREEDY, ignore_eos=True, speculation=speculation)
        for _ in range(7):
            next(pieces)
        listen(alike, PROMPT, 7, GREEDY, ignore_eos=True)
        following = listen(alike, " More.", 30, WARM)
        assert listen(drafted, " More.", 30, WARM) == following


def test_cancelling_inside_a_draft_ends_the_answer_there(model: Model) -> None:
    with model.session(seed=4) as plain, model.session(seed=4) as drafted:
        right = listen(plain, PROMPT, 60, GREEDY, ignore_eos=True).tokens
        pieces = drafted.generate(
            PROMPT, params=GREEDY, ignore_eos=True, speculation=put(drafted, Scripted(plain.tokens, all_right))
        )
        said = [next(pieces).token for _ in range(5)]
        drafted.cancel()
        assert list(pieces) == [] and drafted.stop_reason == "cancelled"
        assert tuple(said) == right[:5]
        again = listen(drafted, "", 10, GREEDY, ignore_eos=True)
        assert len(again.tokens) == 10


def test_a_stop_string_that_spans_a_round_ends_at_the_same_letter(model: Model) -> None:
    with model.session(seed=2) as plain, model.session(seed=2) as drafted, model.session(seed=2) as whole:
        text = listen(whole, PROMPT, 60, HOT, ignore_eos=True).text
        middle = len(text) // 2
        stop = [text[middle : middle + 6]]
        expected = listen(plain, PROMPT, 60, HOT, ignore_eos=True, stop=stop)
        assert expected.stop_reason == "stop"
        speculation = put(drafted, Scripted(whole.tokens, all_right))
        assert listen(drafted, PROMPT, 60, HOT, speculation, ignore_eos=True, stop=stop) == expected


def test_the_end_of_a_sequence_inside_a_draft_ends_the_answer(model: Model) -> None:
    eog = min(model.tokenizer.eog_ids)
    bias = SamplingParams(temperature=1.0, logit_bias={eog: 4.0})
    with model.session(seed=5) as plain, model.session(seed=5) as drafted:
        expected = listen(plain, PROMPT, 200, bias)
        assert expected.stop_reason == "eos" and len(expected.tokens) > 1
        right = (*plain.tokens, *[eog] * 40)
        assert listen(drafted, PROMPT, 200, bias, put(drafted, Scripted(right, all_right))) == expected


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 3, 17])
def test_n_predict_inside_a_draft_is_kept_to(model: Model, n_tokens: int) -> None:
    with model.session(seed=5) as plain, model.session(seed=5) as drafted, model.session(seed=5) as longer:
        listen(longer, PROMPT, 100, GREEDY, ignore_eos=True)
        expected = listen(plain, PROMPT, n_tokens, GREEDY, ignore_eos=True)
        speculation = put(drafted, Scripted(longer.tokens, all_right))
        assert listen(drafted, PROMPT, n_tokens, GREEDY, speculation, ignore_eos=True) == expected


def test_a_context_is_filled_to_its_last_token(model: Model) -> None:
    n_prompt = len(model.tokenizer.encode(PROMPT))
    ctx = n_prompt + 40
    with model.session(seed=5, ctx_size=ctx) as plain, model.session(seed=5, ctx_size=ctx) as drafted:
        expected = listen(plain, PROMPT, -1, WARM, ignore_eos=True)
        assert expected.stop_reason == "context_full" and len(plain.tokens) == ctx
        right = (*plain.tokens, *range(100))
        assert listen(drafted, PROMPT, -1, WARM, put(drafted, Scripted(right, all_right)), ignore_eos=True) == expected


def test_rejected_rows_of_a_hybrid_never_leave_its_log(folder: Path) -> None:
    """No state is restored and no token run again, whatever was drafted over the borders of chunks."""
    with open_model(folder, "hybrid") as model, model.session(seed=8) as plain, model.session(seed=8) as drafted:
        listen(plain, PROMPT, 3 * CHUNK_TOKENS, GREEDY, ignore_eos=True)
        speculation = put(drafted, Scripted(plain.tokens, half_right))
        listen(drafted, PROMPT, 3 * CHUNK_TOKENS, GREEDY, speculation, ignore_eos=True)
        assert drafted.stats.recomputed_tokens == 0
        assert drafted.tokens == plain.tokens


def test_without_temperature_probabilistic_drafting_is_plain_decoding(model: Model) -> None:
    speculation = SpeculationParams(types=DRAFTERS, draft_sampling="probabilistic", **SMALL)  # type: ignore[arg-type]
    with model.session(seed=7) as plain, model.session(seed=7) as drafted:
        expected = listen(plain, PROMPT, 60, GREEDY, ignore_eos=True)
        assert listen(drafted, PROMPT, 60, GREEDY, speculation, ignore_eos=True) == expected


def test_probabilistic_drafting_gives_one_text_for_a_seed_and_progresses(model: Model) -> None:
    speculation = SpeculationParams(types=DRAFTERS, draft_sampling="probabilistic", **SMALL)  # type: ignore[arg-type]
    answers = []
    for _ in range(2):
        with model.session(seed=7) as session:
            answers.append(listen(session, PROMPT, 60, WARM, speculation, ignore_eos=True))
            draft = session.stats.draft
            assert draft is not None and draft.rounds > 0
    assert answers[0] == answers[1] and len(answers[0].tokens) == 60


@pytest.mark.parametrize("n_right", range(5))
@pytest.mark.parametrize("n_more", [0, 1, 2])
def test_whatever_is_pushed_behind_a_draft_decides_which_rows_stay(model: Model, n_right: int, n_more: int) -> None:
    """Without an engine between: tokens of the draft, then others, several of them pending at once."""
    draft = [10, 11, 12, 13]
    pushed = [*draft[:n_right], *[20 + i for i in range(n_more)]]
    with model.session() as plain, model.session() as drafted:
        for session in (plain, drafted):
            session.forward([*range(1, 150)])
            session._core.push(9)
        drafted._core.verify(draft)
        for token in pushed:
            plain.forward((), phase=Phase.DECODE)
            plain._core.push(token)
            drafted._core.push(token)
        assert plain.tokens == drafted.tokens
        expected = plain.forward((), phase=Phase.DECODE)
        assert drafted.forward((), phase=Phase.DECODE).tobytes() == expected.tobytes()
        assert drafted.forward([1, 2, 3]).tobytes() == plain.forward([1, 2, 3]).tobytes()


def test_a_draft_must_fit_and_have_one_token_before_it(model: Model) -> None:
    with model.session(ctx_size=200) as session:
        core = session._core
        core.forward([*range(1, 100)])
        assert core.draft_room == 0
        with pytest.raises(InvalidArgument, match="there is room for 0"):
            core.verify([1])
        core.push(9)
        assert core.draft_room == 63
        for draft in ([], [1] * 64):
            with pytest.raises(InvalidArgument, match=f"a draft of {len(draft)} tokens; there is room for 63"):
                core.verify(draft)
        assert core.verify([1] * 63).shape == (64, model.config.n_vocab)
        core.forward([*range(1, 90)])
        core.push(9)
        assert core.draft_room == 200 - len(core.tokens)
        assert core.verify([1] * core.draft_room).shape[0] == 201 - len(core.tokens)
