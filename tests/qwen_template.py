"""A chat template with the semantics of spec/model.md 7.3, written for the tests, and expected texts.

Tags stand on lines of their own with spaces before them: without trim_blocks and lstrip_blocks the texts differ.
"""

from __future__ import annotations

QWEN = """\
{% macro text_of(content) %}
  {% if content is string %}
{{ content }}
  {%- else %}
    {% for part in content or [] %}
      {% if part.type != 'text' %}
        {% continue %}
      {% endif %}
{{ part.text }}
    {%- endfor %}
  {% endif %}
{% endmacro %}
{% macro turn(role, text) %}
{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}
{%- endmacro %}
{% if not messages %}
  {{ raise_exception('there is nothing to say') }}
{% endif %}
{% set asked = namespace(last=-1) %}
{% for message in messages[::-1] %}
  {% if message.role == 'user' and not text_of(message.content).startswith('<tool_response>') %}
    {% set asked.last = messages|length - 1 - loop.index0 %}
    {% break %}
  {% endif %}
{% endfor %}
{% set system = text_of(messages[0].content)|trim if messages[0].role == 'system' else '' %}
{% set today = 'Today is ' ~ strftime_now('%Y') ~ '.' if dated else '' %}
{% if tools %}
  {% set listed = namespace(text='') %}
  {% for tool in tools %}
    {% set listed.text = listed.text ~ '\\n' ~ tool|tojson %}
  {% endfor %}
{{ turn('system', 'Tools:\\n<tools>' ~ listed.text ~ '\\n</tools>\\nCall them as <tool_call> <function=NAME>.'
        ~ ('\\n\\n' ~ system if system else '') ~ today) }}
{%- elif system or today %}
{{ turn('system', system ~ today) }}
{%- endif %}
{% for message in messages %}
  {% if message.role == 'user' %}
{{ turn('user', text_of(message.content)) }}
  {%- elif message.role == 'assistant' %}
    {% set out = namespace(text=text_of(message.content)|trim) %}
    {% if preserve_thinking or loop.index0 > asked.last %}
      {% set thought = (message.reasoning_content or '')|trim('\\n') %}
      {% set out.text = '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' ~ out.text %}
    {% endif %}
    {% for call in message.tool_calls or [] %}
      {% set out.text = out.text ~ '\\n\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' %}
      {% for key, value in call.function.arguments|items %}
        {% set shown = value if value is string else value|tojson|safe %}
        {% set out.text = out.text ~ '<parameter=' ~ key ~ '>\\n' ~ shown ~ '\\n</parameter>\\n' %}
      {% endfor %}
      {% set out.text = out.text ~ '</function>\\n</tool_call>' %}
    {% endfor %}
{{ turn('assistant', out.text) }}
  {%- elif message.role == 'tool' %}
    {% if not loop.previtem or loop.previtem.role != 'tool' %}
{{ '<|im_start|>user' }}
    {%- endif %}
{{ '\\n<tool_response>\\n' ~ text_of(message.content) ~ '\\n</tool_response>' }}
    {%- if not loop.nextitem or loop.nextitem.role != 'tool' %}
{{ '<|im_end|>\\n' }}
    {%- endif %}
  {% elif message.role != 'system' or not loop.first %}
    {{ raise_exception('no place for ' ~ message.role) }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}
  {% if enable_thinking is defined and not enable_thinking %}
{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}
  {%- else %}
{{ '<|im_start|>assistant\\n<think>\\n' }}
  {%- endif %}
{% endif %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "description": "É <b> 'x' & \"y\"",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "mode": {"type": "integer"}, "tags": {"type": "array"}},
                "required": ["path"],
            },
        },
    }
]
"""The keys are not in alphabetical order, and the description has what HTML would escape."""
