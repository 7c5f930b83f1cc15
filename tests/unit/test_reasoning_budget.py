"""The budget of thinking, in a session: forced tokens are tokens like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pykvstream.engine import Model, Session
from pykvstream.errors import Unsupported
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.target import Phase
from pykvstream.sampling import Sampler, SamplingParams
from pykvstream.sampling.logprobs import Choice
from pykvstream.text.deltas import ContentDelta, ReasoningDelta
from pykvstream.text.reasoning import OutputParser, ReasoningBudget, Start
from pykvstream.text.wishes import Reasoning
from tests.models import write_random_model
from tests.qwen_template import QWEN

END = "\n</think>\n\n"
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = tmp_path_factory.mktemp("budget") / "model.gguf"
    write_random_model(path, n_layers=1, n_embd=64, n_heads=2, n_kv_heads=1, n_ff=64, ctx=1024, seed=3)
    with Model.open(path, arena_mib=8, threads=1, ubatch_size=64) as made:
        yield made


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    with model.session(seed=7) as made:
        yield made


def plain_params(model: Model) -> SamplingParams:
    """Letters alone are chosen: every token but them has the bias minus infinity."""
    letters = {model.tokenizer.token_id(char) for char in "abcdefgh"}
    return SamplingParams(
        logit_bias={token: float("-inf") for token in range(model.tokenizer.n_vocab) if token not in letters}
    )


def answer_to(model: Model, session: Session, reasoning: Reasoning, max_tokens: int = 40) -> list[Piece]:
    prompt = model.chat_prompt(ASK, template=model.make_chat_template(QWEN), reasoning=reasoning)
    pieces = session.generate(prompt, max_tokens=max_tokens, params=plain_params(model))
    return [Piece(p.token, p.text, p.logprob, p.logits.copy(), p.deltas) for p in pieces]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("message", ["", " Enough."])
def test_after_n_thinking_tokens_the_message_and_the_end_are_forced(
    model: Model, session: Session, budget: int, message: str
) -> None:
    free = [piece.token for piece in answer_to(model, model.session(seed=7), Reasoning())]
    pieces = answer_to(model, session, Reasoning(budget=budget, message=message))
    tokens = [piece.token for piece in pieces]
    forced = [*model.tokenizer.encode(message), *model.tokenizer.encode(END, specials=True)]
    assert tokens[:budget] == free[:budget]
    assert tokens[budget : budget + len(forced)] == forced
    assert len(tokens) == 40 and session.tokens[-40:] == tuple(tokens)
    thought = model.tokenizer.decode(tokens[:budget]) + message
    assert session.answer is not None and session.answer.reasoning == thought
    assert session.answer.content == model.tokenizer.decode(tokens[budget + len(forced) :])


def test_logits_with_forced_tokens_are_those_of_the_same_tokens_run_plainly(model: Model, session: Session) -> None:
    pieces = answer_to(model, session, Reasoning(budget=3, message="x"))
    n_prompt = len(session.tokens) - len(pieces)
    with model.session() as plain:
        row = plain.forward(session.tokens[:n_prompt])
        for piece in pieces:
            assert np.array_equal(row[0], piece.logits)
            peak = row[0, : model.tokenizer.n_vocab].astype(np.float64)
            want = peak[piece.token] - np.log(np.exp(peak).sum())
            assert piece.logprob == pytest.approx(want, abs=1e-4)
            row = plain.forward([piece.token], phase=Phase.DECODE)


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    budget = ReasoningBudget(4, [1, 2], OutputParser(Start.REASONING))
    forced = []
    for text in ("a", "b</think>", "c", "d", "e", "f"):
        forced.append(budget.forced())
        budget.spend(text, is_whole=True)
    assert forced == [None] * 6


def test_thinking_counts_from_where_the_model_opens_it() -> None:
    budget = ReasoningBudget(2, [1, 2], OutputParser(Start.EITHER))
    forced = []
    for text in ("\n", "<think>", "a", "b", "</think>", "", "c"):
        forced.append(budget.forced())
        budget.spend(text, is_whole=True)
    assert forced == [None, None, None, None, 1, 2, None]


def test_a_character_is_finished_before_the_end_is_forced(
    model: Model, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [*model.tokenizer.encode("a🚀"), *model.tokenizer.encode("bcd" * 9)]
    begin = len(model.chat_prompt(ASK, template=model.make_chat_template(QWEN)).ids)
    monkeypatch.setattr(Sampler, "choose", lambda _, __, position, ___: Choice(script[position - begin], 0.0))
    assert len(script) == 5 + 27
    answer_to(model, session, Reasoning(budget=2), max_tokens=20)
    assert session.answer is not None and session.answer.reasoning == "a🚀"


def test_deltas_of_pieces_are_the_answer(model: Model, session: Session) -> None:
    pieces = answer_to(model, session, Reasoning(budget=4))
    deltas = [delta for piece in pieces for delta in piece.deltas]
    assert session.answer is not None
    assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) == session.answer.reasoning
    assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)) == session.answer.content
    assert session.answer.reasoning and session.answer.content


def test_a_second_question_drops_the_thinking_and_an_own_budget_holds(model: Model, session: Session) -> None:
    template = model.make_chat_template(QWEN)
    for question in ("one", "two"):
        list(
            session.chat(
                question, template=template, reasoning=Reasoning(budget=2), max_tokens=20, params=plain_params(model)
            )
        )
        assert session.answer is not None and len(session.answer.reasoning) == 2
    text = model.tokenizer.decode(session.tokens, specials=True)
    assert text.count("<think>") == 1 and text.count("</think>") == 1
    assert text.index("two") < text.index("<think>")


def test_a_turn_that_was_cancelled_before_its_answer_loses_nothing(model: Model, session: Session) -> None:
    template = model.make_chat_template(QWEN)
    how = {"template": template, "max_tokens": 16, "params": plain_params(model), "reasoning": Reasoning(budget=2)}
    list(session.chat("one", **how))  # type: ignore[arg-type]
    pieces = session.chat("never", **how)  # type: ignore[arg-type]
    session.cancel()
    assert list(pieces) == [] and session.stop_reason == "cancelled"
    list(session.chat("two", **how))  # type: ignore[arg-type]
    with model.session(seed=7) as other:
        for question in ("one", "two"):
            list(other.chat(question, **how))  # type: ignore[arg-type]
        assert other.tokens == session.tokens


def test_a_budget_for_a_model_that_does_not_think_is_refused(session: Session) -> None:
    with pytest.raises(Unsupported, match="reasoning budget"):
        session.chat("hi", reasoning=Reasoning(budget=1))
    assert session.tokens == ()
