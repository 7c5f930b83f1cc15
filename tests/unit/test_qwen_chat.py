"""Chats with a Qwen-style template: what is rendered, what an answer is, what a next turn keeps."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence

import pytest

from pykvstream.errors import InvalidArgument, Unsupported
from pykvstream.text.chat import ChatTemplate
from pykvstream.text.deltas import Answer, ArgumentsDelta, CallStart, ToolCall
from pykvstream.text.prompt import ChatSetting
from pykvstream.text.reasoning import OutputParser, Start
from pykvstream.text.schemas import ANY, ToolSchemas, json_text
from pykvstream.text.tokenizer import Tokenizer
from pykvstream.text.transcript import Transcript, Turn
from pykvstream.text.wishes import Reasoning
from tests.qwen_template import QWEN, TOOLS
from tests.text_fixtures import SPECIALS, vocabulary
from tests.unit.test_chat_template import CHATML, plain_jinja

TEMPLATE = ChatTemplate(QWEN)
TOKENIZER = Tokenizer.from_metadata(vocabulary(specials=[*SPECIALS, ("<tool_call>", 4), ("</tool_call>", 4)]), 10_000)
ASK = {"role": "user", "content": "Write <b>."}
CALL = {"function": {"name": "write", "arguments": {"path": "a\n", "mode": 7, "tags": ["é", None]}}}
TALK: list[Mapping[str, object]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "greet"},
    ASK,
    {"role": "assistant", "content": "", "reasoning_content": "\nwrite\n", "tool_calls": [CALL]},
    {"role": "tool", "content": "done"},
    {"role": "tool", "content": "twice"},
]


def setting(reasoning: Reasoning | None = None, tools: object = None, **variables: object) -> ChatSetting:
    return ChatSetting(TEMPLATE, tools, reasoning or Reasoning(), variables)  # type: ignore[arg-type]


class TestTemplate:
    @pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"preserve_thinking": True, "dated": True}])
    @pytest.mark.parametrize("tools", [None, TOOLS])
    @pytest.mark.parametrize("n", range(1, len(TALK) + 1))
    def test_rendering_equals_plain_jinja_for_every_beginning_of_a_talk(
        self, variables: dict[str, object], tools: object, n: int
    ) -> None:
        source = QWEN.replace("strftime_now('%Y')", f"'{datetime.datetime.now().year}'")
        want = plain_jinja(source, messages=TALK[:n], tools=tools, add_generation_prompt=True, **variables)
        assert ChatSetting(TEMPLATE, tools, Reasoning(), variables).render(TALK[:n]).text == want  # type: ignore[arg-type]

    def test_the_text_is_what_the_model_was_trained_on(self) -> None:
        assert setting(tools=TOOLS).render(TALK).text == (
            "<|im_start|>system\nTools:\n<tools>\n"
            + json.dumps(TOOLS[0], ensure_ascii=False)
            + "\n</tools>\nCall them as <tool_call> <function=NAME>.\n\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
            "<|im_start|>user\nWrite <b>.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\nwrite\n</think>\n\n\n\n<tool_call>\n<function=write>\n"
            "<parameter=path>\na\n\n</parameter>\n<parameter=mode>\n7\n</parameter>\n"
            '<parameter=tags>\n["é", null]\n</parameter>\n</function>\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<tool_response>\ntwice\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n"
        )

    @pytest.mark.parametrize(
        ("reasoning", "ending"),
        [
            (Reasoning(), "<think>\n"),
            (Reasoning(enabled=True), "<think>\n"),
            (Reasoning(enabled=False), "<think>\n\n</think>\n\n"),
        ],
    )
    def test_the_switch_decides_how_the_answer_begins(self, reasoning: Reasoning, ending: str) -> None:
        wanted = setting(reasoning)
        rendered = wanted.render([ASK])
        assert rendered.text.endswith(f"<|im_start|>assistant\n{ending}")
        start = wanted.prompt(TOKENIZER, rendered, []).start
        assert start is (Start.CONTENT if reasoning.enabled is False else Start.REASONING)

    def test_preserved_reasoning_is_rendered_in_every_answer(self) -> None:
        texts = [setting(Reasoning(preserve=preserve)).render(TALK).text for preserve in (None, False, True)]
        assert ["greet" in text for text in texts] == [False, False, True]

    def test_a_message_that_ends_like_the_template_opens_no_thinking(self) -> None:
        template = ChatTemplate("{{ messages[0].content }}{# enable_thinking #}{{ enable_thinking }}")
        wanted = ChatSetting(template, None, Reasoning(), {"enable_thinking": ""})
        rendered = wanted.render([{"role": "user", "content": "<think>\n"}])
        assert wanted.prompt(TOKENIZER, rendered, []).start is Start.EITHER

    @pytest.mark.parametrize(
        ("reasoning", "tools", "name"),
        [
            (Reasoning(enabled=True), None, "reasoning on"),
            (Reasoning(preserve=True), None, "reasoning preserve"),
            (Reasoning(budget=1), None, "reasoning budget"),
            (Reasoning(), TOOLS, "tools"),
        ],
    )
    def test_what_the_template_does_not_know_is_refused_by_name(
        self, reasoning: Reasoning, tools: object, name: str
    ) -> None:
        with pytest.raises(Unsupported, match=f"^{name}: this chat template does not know"):
            ChatSetting(ChatTemplate(CHATML), tools, reasoning, {})  # type: ignore[arg-type]

    @pytest.mark.parametrize("reasoning", [Reasoning(enabled=False), Reasoning(budget=0)])
    def test_a_model_that_does_not_think_need_not_be_kept_from_it(self, reasoning: Reasoning) -> None:
        wanted, free = (ChatSetting(ChatTemplate(CHATML), None, each, {}) for each in (reasoning, Reasoning()))
        assert wanted.render(TALK) == free.render(TALK)
        assert wanted.prompt(TOKENIZER, wanted.render(TALK), []).limit() is None

    def test_a_model_that_always_thinks_cannot_be_kept_from_it(self) -> None:
        with pytest.raises(Unsupported, match=r"^reasoning off: this chat template does not know"):
            ChatSetting(ChatTemplate(CHATML + "{# <think> #}"), None, Reasoning(enabled=False), {})

    def test_calls_of_another_form_are_refused(self) -> None:
        with pytest.raises(Unsupported, match="calls of another form"):
            ChatSetting(ChatTemplate("{{ tools }}<tool_call>{}"), TOOLS, Reasoning(), {})

    @pytest.mark.parametrize("wrong", [{"enabled": 1}, {"preserve": "on"}, {"budget": 1.5}, {"message": None}])
    def test_a_wish_that_cannot_be_meant_is_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            Reasoning(**wrong)  # type: ignore[arg-type]

    @pytest.mark.parametrize("tools", ["write", [1], [{}], [{"function": {"name": ""}}]])
    def test_tools_without_names_are_refused(self, tools: object) -> None:
        with pytest.raises(InvalidArgument, match="tools"):
            setting(tools=tools)


def taken_apart(text: str, start: Start = Start.REASONING, tools: Sequence[Mapping[str, object]] = TOOLS) -> Answer:
    transcript = Transcript()
    wanted = setting(tools=tools)
    prompt = wanted.prompt(TOKENIZER, wanted.render([ASK]), [])
    transcript.begin(Turn((), 0, prompt))
    assert prompt.start is start
    for char in text:
        transcript.add(char)
    transcript.finish()
    assert transcript.answer is not None
    return transcript.answer


def call(name: str, body: str) -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


class TestAnswers:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("\nhm\n\n</think>\n\nYes.\n", Answer("hm", "Yes.\n", ())),
            ("hm", Answer("hm", "", ())),
            ("hm\n</thin", Answer("hm\n</thin", "", ())),
            ("a <think> b</think>c</think>d", Answer("a <think> b", "c</think>d", ())),
            ("hm\n" + call("f", ""), Answer("hm", "", (ToolCall("f", "{}", True),))),
            ("</think>\n\nLook:\n\n" + call("f", ""), Answer("", "Look:", (ToolCall("f", "{}", True),))),
            ("</think>" + call("f", "") + "\n\nso", Answer("", "so", (ToolCall("f", "{}", True),))),
            ("</think>" + call("f", "") + "\n" + call("g", ""),
             Answer("", "", (ToolCall("f", "{}", True), ToolCall("g", "{}", True)))),
            ("</think>a <tool_call> b", Answer("", "a <tool_call> b", ())),
            ('</think><tool_call>\n{"name": "f"}', Answer("", '<tool_call>\n{"name": "f"}', ())),
            ("</think><tool_call>\n<function=f", Answer("", "<tool_call>\n<function=f", ())),
            ("</think><tool_call><tool_call>\n<function=f>\n</function>\n</tool_call>",
             Answer("", "<tool_call>", (ToolCall("f", "{}", True),))),
            ("</think><tool_call>\n<function=f>\nwhat", Answer("", "what", (ToolCall("f", "", False),))),
            ("</think>" + call("write", "<parameter=\n"), Answer("", "<parameter=\n</function>\n</tool_call>",
                                                                    (ToolCall("write", "", False),))),
        ],
    )  # fmt: skip
    def test_parts_of(self, text: str, answer: Answer) -> None:
        assert taken_apart(text) == answer

    @pytest.mark.parametrize(
        ("key", "value", "argument"),
        [
            ("path", "#include\n", "#include\n"),
            ("path", "", ""),
            ("path", "5", "5"),
            ("path", 'say "</parameter>" \\ and </function>', 'say "</parameter>" \\ and </function>'),
            ("path", "a\n</parameter> b", "a\n</parameter> b"),
            ("path", "</parameter>\nb", "</parameter>\nb"),
            ("mode", "5", 5),
            ("mode", " 5\n", 5),
            ("mode", "five", "five"),
            ("tags", '["a", {"b": null}]', ["a", {"b": None}]),
            ("other", "true", True),
            ("other", '"quoted"', '"quoted"'),
        ],
    )
    def test_a_value_has_the_type_of_its_schema(self, key: str, value: str, argument: object) -> None:
        (made,) = taken_apart(call("write", parameter(key, value))).tool_calls
        assert made.is_complete and json.loads(made.arguments) == {key: argument}

    def test_an_unfinished_call_has_come_as_far_as_it_was_written(self) -> None:
        text = f"<tool_call>\n<function=write>\n{parameter('mode', '7')}<parameter=path>\nab\n</par"
        assert taken_apart(text).tool_calls == (ToolCall("write", '{"mode": 7, "path": "ab\\n</par', False),)

    def test_strings_go_out_as_they_come_and_the_name_first(self) -> None:
        parser = OutputParser(Start.CONTENT, ToolSchemas(TOOLS))
        assert parser.push("<tool_call>\n<function=write>") == [CallStart(0, "write")]
        assert parser.push("\n<parameter=path>\n") == [ArgumentsDelta(0, '{"path": "')]
        assert parser.push('a"') == [ArgumentsDelta(0, 'a\\"')]
        assert parser.push("\n") == []
        assert parser.push("b") == [ArgumentsDelta(0, "\\nb")]

    def test_without_tools_calls_are_text(self) -> None:
        parser = OutputParser(Start.CONTENT)
        assert "".join(d.text for d in parser.push(call("f", ""))) == call("f", "")  # type: ignore[union-attr]

    @pytest.mark.parametrize("text", ["[" * 100_000, "9" * 65, "1e999", "NaN", '"\\ud800"', "[" * 40 + "]" * 40])
    def test_json_that_cannot_go_back_into_a_prompt_is_a_string(self, text: str) -> None:
        assert json.loads(json_text(text, ANY - {"string"})) == text

    def test_references_unions_and_enumerations_tell_the_kind(self) -> None:
        schema = {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, "b": {"enum": ["x", "y"]}},
            "properties": {
                "ref": {"$ref": "#/$defs/b"},
                "loop": {"$ref": "#/$defs/a"},
                "union": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "list": {"type": ["number", "string"]},
                "const": {"const": 1},
                "all": {"allOf": [{"type": ["string", "null"]}, {"type": "string"}]},
            },
            "additionalProperties": {"type": "boolean"},
        }
        found = ToolSchemas([{"name": "t", "parameters": schema}])
        wanted = {
            "ref": {"string"}, "union": {"string", "null"}, "list": {"number", "integer", "string"},
            "const": {"integer"}, "all": {"string"}, "elsewhere": {"boolean"}, "loop": ANY,
        }  # fmt: skip
        assert {name: found.kinds("t", name) for name in wanted} == wanted
        assert found.kinds("unknown", "x") == ANY


class Conversation:
    """Tokens as a session holds them, with a model that says what it is told to."""

    def __init__(self, wanted: ChatSetting) -> None:
        self.wanted = wanted
        self.tokens: list[int] = []
        self.transcript = Transcript()
        self.n_kept = 0

    def turn(self, *messages: Mapping[str, object]) -> Turn:
        if not self.tokens:
            return self.transcript.first(TOKENIZER, messages, self.wanted)
        return self.transcript.next(TOKENIZER, self.tokens, messages, self.wanted)

    def say(self, *messages: Mapping[str, object], answer: str) -> None:
        turn = self.turn(*messages)
        self.n_kept = turn.n_kept
        self.tokens = [*self.tokens[: turn.n_kept], *turn.prompt.ids]
        self.transcript.begin(turn)
        for token in TOKENIZER.encode(answer, specials=True):
            self.tokens.append(token)
            if token not in TOKENIZER.eog_ids:
                self.transcript.add(TOKENIZER.decode([token]))

    @property
    def text(self) -> str:
        return TOKENIZER.decode(self.tokens, specials=True)


USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


class TestTurns:
    def test_a_new_question_drops_earlier_thinking_and_keeps_all_before_it(self) -> None:
        talk = Conversation(setting())
        talk.say(user("one"), answer="long thought\n</think>\n\nFirst.<|im_end|>")
        before = talk.tokens
        talk.say(user("two"), answer="hm\n</think>\n\nSecond.<|im_end|>")
        first = USER.format("one")
        assert talk.text == f"{first}First.<|im_end|>\n{USER.format('two')}<think>\nhm\n</think>\n\nSecond.<|im_end|>"
        assert before[: talk.n_kept] == TOKENIZER.encode(first, specials=True)

    def test_preserved_thinking_stays_with_its_tokens(self) -> None:
        talk = Conversation(setting(Reasoning(preserve=True)))
        talk.say(user("one"), answer="thought\n</think>\n\nFirst.<|im_end|>")
        said, before = talk.text, talk.tokens
        talk.say(user("two"), answer="x")
        assert talk.text == f"{said}\n{USER.format('two')}<think>\nx" and talk.tokens[: len(before)] == before

    def test_results_of_tools_keep_the_thinking_that_asked_for_them(self) -> None:
        talk = Conversation(setting(tools=TOOLS))
        talk.say(user("one"), answer="use it" + call("write", parameter("path", "p")) + "<|im_end|>")
        said = talk.text
        talk.say({"role": "tool", "content": "ok"}, {"role": "tool", "content": "ok"}, answer="fine")
        results = "\n<tool_response>\nok\n</tool_response>" * 2
        assert talk.text == f"{said}\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n<think>\nfine"

    def test_an_answer_is_rendered_as_the_model_wrote_it(self) -> None:
        wanted = setting(tools=TOOLS)
        text = f"so\n</think>\n\nLook.\n\n{call('write', parameter('mode', '7') + parameter('path', 'p '))}"
        said = wanted.render([ASK, taken_apart(text).as_message()], is_answered=False).text
        assert said == f"{wanted.render([ASK]).text}{text}<|im_end|>\n"

    def test_thinking_that_was_cut_off_is_closed_before_the_next_turn(self) -> None:
        talk = Conversation(setting(Reasoning(preserve=True)))
        talk.say(user("one"), answer="endless")
        talk.say(user("two"), answer="x")
        assert "endless\n</think>\n\n<|im_end|>\n<|im_start|>user\ntwo" in talk.text

    def test_a_turn_that_did_not_come_to_be_is_made_up_for(self) -> None:
        talk = Conversation(setting())
        talk.say(user("one"), answer="thought\n</think>\n\nFirst.<|im_end|>")
        lost = talk.turn(user("never"))
        talk.tokens = talk.tokens[: lost.n_kept]
        talk.transcript.cut()
        talk.say(user("two"), answer="x")
        assert talk.text == f"{USER.format('one')}First.<|im_end|>\n{USER.format('two')}<think>\nx"

    def test_what_a_lost_turn_took_away_comes_back_even_where_turns_are_appended(self) -> None:
        talk = Conversation(setting())
        talk.say(user("one"), answer="thought\n</think>\n\nFirst.<|im_end|>")
        talk.tokens = talk.tokens[: talk.turn(user("never")).n_kept]
        talk.transcript.cut()
        talk.wanted = setting(Reasoning(preserve=True))
        talk.say(user("two"), answer="x")
        said = f"{USER.format('one')}<think>\nthought\n</think>\n\nFirst.<|im_end|>\n"
        assert talk.text == f"{said}{USER.format('two')}<think>\nx"

    def test_tokens_from_elsewhere_are_kept_and_a_turn_is_appended(self) -> None:
        talk = Conversation(setting())
        talk.say(user("one"), answer="thought\n</think>\n\nFirst.<|im_end|>")
        talk.transcript.forget()
        said = talk.text
        talk.say(user("two"), answer="x")
        assert talk.text == f"{said}\n{USER.format('two')}<think>\nx"

    def test_a_template_that_changes_answers_is_refused_where_it_must_be_appended_to(self) -> None:
        template = ChatTemplate("{% for m in messages %}{{ m.content|upper }}{% endfor %}")
        talk = Conversation(ChatSetting(template, None, Reasoning(), None))
        talk.say(user("one"), answer="First.")
        with pytest.raises(Unsupported, match="changes what the assistant said"):
            talk.turn(user("two"))

    def test_a_copy_goes_on_from_what_was_said_so_far(self) -> None:
        talk = Conversation(setting())
        talk.say(user("one"), answer="thought\n</think>\n\nFirst.")
        child = Conversation(setting())
        child.tokens, child.transcript = list(talk.tokens), talk.transcript.copy()
        talk.transcript.add(" And more.")
        child.say(user("two"), answer="x")
        assert child.text == f"{USER.format('one')}First.<|im_end|>\n{USER.format('two')}<think>\nx"
        assert talk.transcript.answer == Answer("thought", "First. And more.", ())
