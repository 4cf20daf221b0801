"""Chat templates: the makers' text, a closed sandbox, errors with a line, bounded work."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from slipstream.errors import LoadError, RequestError
from slipstream.models.loading import open_model, template
from slipstream.models.loading.template import ChatTemplate
from tests.gguf_files import TEMPLATE, real_model

HI = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = None, **options: Any) -> str:
    return ChatTemplate(source).render(HI if messages is None else messages, **options)


def refusal(source: str, messages: Any = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(source, messages)
    assert caught.value.param == "messages"
    return caught.value


# ---- what is rendered


def test_the_assistant_turn_is_opened_only_when_asked() -> None:
    body = "<|im_start|>user\nHi<|im_end|>\n"
    assert render(TEMPLATE) == body + "<|im_start|>assistant\n"
    assert render(TEMPLATE, add_generation_prompt=False) == body


def test_real_template_renders_as_its_makers_document() -> None:
    model = open_model(real_model())
    assert model.template is not None
    # The prompt format of the SmolLM2-135M-Instruct model card, with its default system message.
    assert model.template.render(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, *HI]
    text = model.template.render(own)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert model.tokenizer.encode(text, parse_special=True)[0] == 1


def test_blocks_leave_no_whitespace_behind() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "Hi\n"


def test_html_is_not_escaped() -> None:
    messages = [{"role": "user", "content": "<b>&'\"é"}]
    assert render("{{ messages[0].content }}", messages) == "<b>&'\"é"
    assert render("{{ messages[0].content | tojson }}", messages) == '"<b>&\'\\"é"'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}").startswith('{\n "b": 1')


def test_special_tokens_and_extra_variables_have_names() -> None:
    chat = ChatTemplate("{{ bos_token }}{{ tools }}{{ documents }}", {"bos_token": "<s>"})
    assert chat.render(HI) == "<s>NoneNone"
    assert chat.render(HI, tools=[1]) == "<s>[1]None"


def test_strftime_now_gives_today() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_loops_keep_their_variables_and_controls() -> None:
    messages = [{"role": "user", "content": str(i)} for i in range(5)]
    source = (
        "{% for m in messages if m.content != '1' %}{% if m.content == '3' %}{% break %}{% endif %}"
        "{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}{{ loop.nextitem.content }} "
        "{% endfor %}"
    )
    assert render(source, messages) == "1/42 2/43 "
    assert render("{% for t in missing %}x{% else %}none{% endfor %}") == "none"
    assert render("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}") == (
        "role=user;content=Hi;"
    )
    assert (
        render("{% for m in messages | selectattr('role') %}{{ loop.length }}{% endfor %}") == "1"
    )


def test_generation_blocks_are_their_content() -> None:
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHic"


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    render("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", messages)
    assert messages == HI


# ---- what is refused


@pytest.mark.parametrize(
    ("source", "line"),
    [("{% if %}", 1), ("\n\n{{ 'a' }", 3), ("{% for m in messages %}", 1), ("\n{{ x | nope }}", 2)],
)
def test_sources_that_do_not_compile_are_load_errors_with_the_line(source: str, line: int) -> None:
    with pytest.raises(LoadError, match=f"line {line}"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__",
        "raise_exception.__globals__",
        "self.__init__.__globals__",
        "cycler.__init__.__globals__.os",
        "(messages | attr('__class__')).mro",
        "'{0.__class__.__mro__}'.format(1)",
        "messages.append(1)",
        "messages[0].update(role='x')",
        "messages[0].clear()",
    ],
)
def test_sandbox_escapes_are_refused(expression: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    error = refusal("\n{{ " + expression + " }}", messages)
    assert "line 2" in error.message
    assert messages == HI


@pytest.mark.parametrize("source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}"])
def test_other_files_are_out_of_reach(source: str) -> None:
    refusal(source)


def test_the_templates_own_refusal_is_passed_on() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert error.message == "roles must alternate"
    assert error.code == "template_refused"


@pytest.mark.parametrize(
    "expression", ["messages[0].tool.name", "messages[0].content + 1", "1 / 0", "messages[9].role"]
)
def test_failures_name_the_line(expression: str) -> None:
    error = refusal("a\nb\n{{ " + expression + " }}")
    assert error.code == "template_failed"
    assert "line 3" in error.message


@pytest.mark.parametrize("messages", [[], [{}], [{"content": "x"}], ["Hi"], [{"role": 3}]])
def test_messages_without_a_role_are_refused(messages: Any) -> None:
    refusal(TEMPLATE, messages)


# ---- bounds


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1000000000000 }}",
        "{{ 1000000000000 * [1] }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_bombs_are_refused(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize("body", ["", "x"])
def test_endless_loops_end(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(template, "MAX_RENDER_S", 0.05)
    loop = "{% for i in range(99999) %}"
    error = refusal(loop * 3 + body + "{% endfor %}" * 3)
    assert error.code == "template_bound"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_PROMPT_CHARS", 100)
    assert len(render("{% for i in range(100) %}x{% endfor %}")) == 100
    error = refusal("{% for i in range(101) %}x{% endfor %}")
    assert error.code == "template_bound"


def test_ordinary_products_and_powers_work() -> None:
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 3 * 4 }}{{ 2 ** -1 }}{{ 2.0 ** 0.5 > 1 }}") == (
        "---1024120.5True"
    )


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("{{ messages[0].role }}", set()),
        ("{% if messages[0]['role'] == 'ipython' %}a{% endif %}", {"ipython"}),
        ("{% for m in messages %}{% if 'tool' == m.role %}{% endif %}{% endfor %}", {"tool"}),
        ("{% if messages[0].role not in ['a', ('b')] %}{% endif %}", {"a", "b"}),
        ("{% set role = 'x' %}{% if role != 'y' and tools == 'z' %}{% endif %}", {"y"}),
    ],
)
def test_roles_that_are_asked_for_are_known(source: str, roles: set[str]) -> None:
    assert ChatTemplate(source).roles == roles
