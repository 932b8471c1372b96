"""Templates are rendered as vLLM renders them, and can do nothing else."""

import jinja2
import pytest

from epp.configuration.token_producer import ContentFormat
from epp.shell.engines.tokens.chat_template import (
    MESSAGES_MAX,
    TEXT_CHARACTERS_MAX,
    ChatTemplate,
    NotRenderedError,
)
from tests.shell.engines.tokens.conversations import ARGUMENTS, UNSORTED, WEATHER, call, user

CONTENTS = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}[{{ part.text }}]"
    "{% endfor %}{% endfor %}"
)


def rendered(source, body, **options):
    return ChatTemplate(source, {"bos_token": "<s>"}, **options).render(body)


def test_blocks_and_blanks_are_as_everywhere():
    """A tag takes its line with it."""
    source = "{{ bos_token }}\n  {% if true %}\nx\n  {% endif %}\ny"
    assert rendered(source, {"messages": []}) == "<s>\nx\ny"


def test_loop_controls_and_marks_of_trainers_are_known():
    """As templates use them."""
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
    )
    assert rendered(source, {"messages": [user("a"), user("b")]}) == "user"


def test_json_is_written_as_it_was_said():
    """Members in their order, nothing escaped for HTML or ASCII."""
    source = "{{ tools | tojson }}|{{ tools[0] | tojson(indent=1) | length > 10 }}"
    (written, _) = rendered(source, {"messages": [], "tools": [UNSORTED]}).split("|")
    assert written.startswith('[{"type": "function", "function": {"name": "weather", "desc')
    assert '"required": ["zone", "city"]' in written
    assert "City <name> & more" in written
    assert "é" in written


def test_tools_are_spelt_as_vllm_spells_them():
    """What is missing is null, what is unknown comes last."""
    bare = {"function": {"strict": True, "name": "f"}, "extra": 1}
    written = rendered("{{ tools | tojson }}", {"messages": [], "tools": [bare]})
    assert written == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null, '
        '"strict": true}, "extra": 1}]'
    )
    same = [
        rendered("{{ tools | tojson }}", {"messages": [], "tools": [t]})
        for t in (WEATHER, UNSORTED)
    ]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [('{"b": 1, "a": "é"}', '{"b": 1, "a": "é"}'), ("", "{}"), (None, "{}"), (ARGUMENTS, None)],
)
def test_arguments_of_calls_are_values(given, arguments):
    """Templates write them as JSON themselves."""
    message = {"role": "assistant", "content": None, "tool_calls": [call(given)]}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    expected = arguments or '{"zone": "CET", "city": "Örebro", "altitude": 2}'
    assert rendered(source, {"messages": [message]}) == expected


@pytest.mark.parametrize("content", ["a\nb", [{"type": "text", "text": "a"}, "b"]])
def test_contents_are_texts_or_parts_as_the_template_reads_them(content):
    """One text with line breaks, unless it goes through parts."""
    body = {"messages": [user(content)]}
    assert rendered(CONTENTS, body) == "[a\nb]"
    expected = "[a\nb]" if isinstance(content, str) else "[a][b]"
    assert rendered(PARTS, body) == expected
    through = PARTS.replace("in messages", "in ms").replace(
        "{% for m", "{% set ms = messages[1:] %}{% for m", 1
    )
    assert rendered(through, {"messages": [user("x"), user(content)]}) == expected
    filtered = PARTS.replace("message['content']", "message.content | list")
    assert rendered(filtered, body) == expected


def test_the_form_of_contents_can_be_said():
    """As `--chat-template-content-format` of the engine says it."""
    body = {"messages": [user("a")]}
    assert (
        rendered(CONTENTS, body, content_format=ContentFormat.OPENAI)
        == "[[{'type': 'text', 'text': 'a'}]]"
    )
    assert rendered(PARTS, body, content_format=ContentFormat.STRING) == "[]"


def test_results_reasoning_and_names_reach_the_template():
    """Under the names that vLLM gives them."""
    source = (
        "{% for m in messages %}{{ m.content }},{{ m.tool_call_id }},{{ m.reasoning_content }},"
        "{{ m.name }};{% endfor %}"
    )
    messages = [
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": []},
        {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "i"},
        {"role": "user", "content": "u", "name": "n"},
    ]
    assert rendered(source, {"messages": messages}) == ",,r,;t,i,,;u,,,n;"


def test_variables_come_from_the_request_before_the_configuration():
    """`chat_template_kwargs`, and what else a body may say."""
    source = "{{ enable_thinking }}{{ add_generation_prompt }}{{ reasoning_effort }}{{ a }}"
    made = ChatTemplate(source, {}, variables={"enable_thinking": True, "a": 1})
    assert made.render({"messages": []}) == "TrueTrue1"
    body = {
        "messages": [],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "reasoning_effort": "low",
    }
    assert made.render(body) == "FalseFalselow1"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "a"},
        {"messages": [user("a")] * (MESSAGES_MAX + 1)},
        {"messages": [{"content": "without a role"}]},
        {"messages": ["no message"]},
        {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
        {"messages": [user([1])]},
        {"messages": [user(1)]},
        {"messages": [{"role": "assistant", "tool_calls": [call("no JSON")]}]},
        {"messages": [{"role": "assistant", "tool_calls": ["no call"]}]},
        {"messages": [], "tools": [{"type": "function"}]},
        {"messages": [], "chat_template": "mine"},
        {"messages": [], "continue_final_message": True},
        {"messages": [], "chat_template_kwargs": {"messages": []}},
        {"messages": [], "chat_template_kwargs": ["a"]},
    ],
)
def test_what_the_engine_or_we_do_not_take_is_not_rendered(body):
    """One kind of error, whatever is wrong."""
    with pytest.raises(NotRenderedError):
        rendered(CONTENTS, body)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ [].append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ 1 / 0 }}",
        "{{ missing.member.of }}",
        "{% include '/etc/passwd' %}",
        "{% for a in range(1000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_cannot_leave_its_box(source):
    """It fails for this request."""
    with pytest.raises(NotRenderedError):
        rendered(source, {"messages": [user("a")]})


def test_what_a_template_writes_is_bounded():
    """However it comes to write so much."""
    source = "{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}"
    text = "x" * (TEXT_CHARACTERS_MAX // 80_000)
    with pytest.raises(NotRenderedError):
        rendered(source, {"messages": [user(text)]})


def test_a_template_that_is_none_is_told_of_when_it_is_loaded():
    """Not with each request."""
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate("{% for %}", {})


def test_the_date_is_todays():
    """Some templates print it."""
    assert rendered("{{ strftime_now('%Y') | int > 2000 }}", {"messages": []}) == "True"
