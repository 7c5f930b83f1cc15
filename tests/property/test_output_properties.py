"""An answer taken apart is the same in any pieces, loses nothing, and keeps nothing back that is decided."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pykvstream.text.deltas import (
    Answer,
    AnswerBuilder,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    merged,
)
from pykvstream.text.reasoning import OutputParser, Start
from pykvstream.text.schemas import ANY, STRING, ToolSchemas, json_text
from tests.examples import examples

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "u": {"type": ["string", "object"]}},
            },
        },
    }
]
SCHEMAS = ToolSchemas(TOOLS)

PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "<function=", "</function>",
    "<parameter=s>", "<parameter=n>", "<parameter=u>", "<parameter=", "</parameter>", "\n</parameter>\n", "\n", "\n\n",
    "<", ">", "</", "a", "5", '{"a": [1, null]}', '"', "\\", " ", "\t", "é🚀", "<tool_call>\n<function=f>\n",
    "<parameter=s>\nx\n</parameter>\n", "<parameter=n>\n-7\n</parameter>\n", "</function>\n</tool_call>",
)  # fmt: skip
hostile_text = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
starts = st.sampled_from(Start)
schemas = st.sampled_from([None, SCHEMAS])


def deltas_of(pieces: Sequence[str], start: Start, tools: ToolSchemas | None) -> list[Delta]:
    parser = OutputParser(start, tools)
    found = [delta for piece in pieces for delta in parser.push(piece)]
    return merged([*found, *parser.finish()])


def answer_of(text: str, start: Start, tools: ToolSchemas | None = SCHEMAS) -> Answer:
    builder = AnswerBuilder()
    builder.add(deltas_of([text], start, tools))
    return builder.answer()


def cut(text: str, points: Sequence[int]) -> list[str]:
    ends = sorted({min(point, len(text)) for point in points} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(hostile_text, st.lists(st.integers(0, 300), max_size=12), starts, schemas)
@settings(max_examples=examples(1500), deadline=None)
@example("</think>\n\nx", [3], Start.REASONING, None)
@example("t<tool_call>\n<function=f>\n<parameter=s>\n#include\n\n</parameter>\n", [1], Start.REASONING, SCHEMAS)
def test_any_pieces_and_single_characters_give_the_deltas_of_the_whole(
    text: str, points: list[int], start: Start, tools: ToolSchemas | None
) -> None:
    whole = deltas_of([text], start, tools)
    assert deltas_of(cut(text, points), start, tools) == whole
    assert deltas_of(list(text), start, tools) == whole


@given(hostile_text, starts, schemas)
@settings(max_examples=examples(600), deadline=None)
def test_calls_have_a_name_first_and_json_at_the_end(text: str, start: Start, tools: ToolSchemas | None) -> None:
    found = deltas_of([text], start, tools)
    open_call: int | None = None
    for delta in found:
        if isinstance(delta, CallStart):
            assert open_call is None
            open_call = delta.index
        elif isinstance(delta, CallEnd):
            assert delta.index == open_call
            open_call = None
        else:
            is_text = isinstance(delta, ReasoningDelta | ContentDelta)
            assert delta.text and (is_text if open_call is None else getattr(delta, "index", None) == open_call)
    assert open_call is None
    kinds = [type(delta) for delta in found]
    assert ReasoningDelta not in kinds[1:]
    for call in answer_of(text, start, tools).tool_calls:
        if call.is_complete:
            assert isinstance(json.loads(call.arguments), dict)


@given(hostile_text, st.sampled_from([Start.REASONING, Start.CONTENT]))
@settings(max_examples=examples(500), deadline=None)
def test_reasoning_and_content_are_the_text_cut_at_the_first_tag(text: str, start: Start) -> None:
    answer = answer_of(text, start, None)
    thought, _tag, rest = text.partition("</think>") if start is Start.REASONING else ("", "", text)
    assert answer.reasoning == thought.strip("\n")
    assert answer.content == rest.lstrip("\n")
    assert answer.tool_calls == ()


@given(st.text("ab<>/think \n", max_size=40), starts)
@settings(max_examples=examples(500), deadline=None)
def test_only_the_beginning_of_a_tag_and_line_breaks_are_kept_back(text: str, start: Start) -> None:
    tags = {Start.REASONING: ["</think>", "<tool_call>"], Start.CONTENT: ["<tool_call>"]}
    parser = OutputParser(start, SCHEMAS)
    out = "".join(delta.text for delta in parser.push(text) if isinstance(delta, ReasoningDelta | ContentDelta))
    if start is Start.EITHER or any(tag in text for tag in ("</think>", "<tool_call>")):
        return
    held = next(
        text[at:] for at in range(len(text) + 1) if any(tag.startswith(text[at:]) for tag in tags[start])
    )
    assert out == text.removesuffix(held).strip("\n")


values = st.text("ab\n</parmet>5{}\"\\ é", max_size=20).filter(
    lambda value: f"{value}\n</parameter>\n".index("\n</parameter>\n") == len(value)
)
arguments = st.dictionaries(st.text("abc'\" é", min_size=1, max_size=4), values, max_size=3)


@given(st.lists(arguments, min_size=1, max_size=3), st.text("ab ", max_size=5), st.text("ab. ", max_size=5))
@settings(max_examples=examples(500), deadline=None)
def test_calls_as_templates_write_them_are_read_back(
    calls: list[dict[str, str]], thought: str, said: str
) -> None:
    text = f"{thought}\n</think>\n\n{said}"
    for call in calls:
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.items())
        text += f"\n\n<tool_call>\n<function=tool>\n{parameters}</function>\n</tool_call>"
    strings = {"type": "object", "additionalProperties": {"type": "string"}}
    answer = answer_of(text, Start.REASONING, ToolSchemas([{"name": "tool", "parameters": strings}]))
    assert (answer.reasoning, answer.content) == (thought, said)
    assert [json.loads(call.arguments) for call in answer.tool_calls] == calls
    assert all(call.is_complete and call.name == "tool" for call in answer.tool_calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(json_values)
@settings(deadline=None)
def test_json_values_that_are_no_strings_stand_as_they_were_written(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    want = json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text
    assert json_text(f" {text}\n", ANY) == (want if want == text else json_text(f" {text}\n", STRING))


@given(st.text(max_size=12), st.sets(st.sampled_from(sorted(ANY)), min_size=1))
@settings(max_examples=examples(500), deadline=None)
def test_any_text_of_any_kind_becomes_json(text: str, kinds: set[str]) -> None:
    json.loads(json_text(text, frozenset(kinds)))


def test_long_hostile_texts_are_the_same_in_single_characters() -> None:
    n = 20_000
    for piece in ("<tool_call>", "<tool_call>\n<function=", "\n", "</think", "<tool_call> ", "\n</parameter>"):
        for head in ("", "<tool_call>\n<function=f>\n<parameter=n>\n", "<tool_call>\n<function=f>\n<parameter=s>\n"):
            text = head + piece * (n // len(piece))
            assert deltas_of(list(text), Start.CONTENT, SCHEMAS) == deltas_of([text], Start.CONTENT, SCHEMAS)
