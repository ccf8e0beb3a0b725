"""Chat templates are programs of strangers: rendered as by transformers, but within limits of time and memory."""

from __future__ import annotations

from datetime import datetime

import pytest
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer

from specdemo.core.errors import UserError
from specdemo.models import chat_template
from specdemo.models.tokenizer import encode_prompt, prompt_text

pytestmark = pytest.mark.slow

CHAT = [
    {"role": "system", "content": "Be <short> & 'kind'."},
    {"role": "user", "content": "naïve 東京 🙂"},
    {"role": "assistant", "content": '"quoted"'},
    {"role": "user", "content": "  spaces  "},
]
SAME = {
    "loop": TEMPLATE,
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(sort_keys=true) }}",
    "special tokens": "{{ eos_token }}{{ bos_token is defined }}{{ unknown is defined }}{{ tools }}{{ documents }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "whitespace": "  {% for m in messages %}\n    {{- m.content | trim }}\n  {% endfor %}\n",
    "macro": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "methods": "{{ messages[0].content.upper().split()[0] }}{{ messages[1]['content'][-1:] }}{{ dict(a=1) }}",
    "year": "{{ strftime_now('%Y') }}",
    "prompt": "{% if add_generation_prompt %}<assistant>{% endif %}",
}
FAILING = {
    "attribute": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "globals": ("{{ namespace.__init__.__globals__ }}", "SecurityError"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "too much time|more than 20 s",
    ),
    "endless expression": ("{{ (9 ** 9) ** (9 ** 9) }}", "too much time"),
    "memory": ("{{ 'a' * 10 ** 11 }}", "too much memory"),
    "doubling": (
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "too much memory",
    ),
    "long text": ("{{ 'a' * 10 ** 7 }}", "10,000,000 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too often"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import '/etc/passwd' as secrets %}", "no loader"),
    "exception": ("{{ raise_exception('no\x1b[2J\nsystem role') }}", "no  ?.?2J system role"),
    "division": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "syntax": ("{% for", "TemplateSyntaxError"),
    "unknown filter": ("{{ 1 | telepathy }}", "telepathy"),
    "lone surrogate": ("{{ '\\ud800' }}", "invalid character"),
    "number": (7, "no chat template"),
    "several without default": ({"tool_use": "x"}, "multiple chat templates"),
}


@pytest.mark.parametrize("name", SAME)
def test_templates_render_as_in_transformers(name: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = SAME[name]
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt_text(tokenizer, CHAT, chat=True) == expected
    assert expected or name == "year" and expected == str(datetime.now().year)


# The endless templates take five seconds, the limit of CPU time.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name.startswith("endless") else ()) for name in FAILING],
)
def test_hostile_templates_end_in_one_sentence(name: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template, part = FAILING[name]
    with pytest.raises(UserError, match=part) as caught:
        prompt_text(tokenizer, "hello", chat=True)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_a_template_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_WALL_SECONDS", 0.5)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template, _ = FAILING["endless loop"]
    with pytest.raises(UserError, match=r"takes more than 0\.5 s"):
        prompt_text(tokenizer, "hello", chat=True)


def test_rendered_conversations_are_not_cached() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ range(99999) | random }}"
    assert len({prompt_text(tokenizer, CHAT, chat=True) for _ in range(3)}) > 1  # equal with probability 1e-10


def test_prompts_without_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="finds no tokens"):
        encode_prompt(byte_level_tokenizer(), "", chat=False, vocab_size=300)
