"""Row templates in a sandbox with bounds, and the syntax of chat templates."""

import time

import jinja2
import pytest

from cbgen.data.templates import check_chat_template, compile_template
from cbgen.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ 2 * 3 }} {{ 2 ** 10 }} {{ 3.5 ** 2 }} {{ 7 % 3 }} {{ 1 + 1 }}", "6 1024 12.25 1 2"),
        ("{{ 'a' * 3 }}{{ 'x' + 'y' }}{{ [1] * 2 }}{{ 2 * 'b' }}", "aaaxy[1, 1]bb"),
        ("{{ '%05d' % 3 }} {{ '%s-%s' % ('a', 'b') }} {{ '%s-%s'|format(1, 2) }}", "00003 a-b 1-2"),
        ("{{ '{:>5}'.format(3) }}{{ '{{}}{a}'.format(a=1000000000) }}{{ '{a:>3}'.format_map({'a': 1}) }}",
         "    3{}1000000000  1"),
        ("{{ 'a'|center(5) }}|{{ 'a'.ljust(3) }}|{{ 'a\nb'|indent(2) }}|{{ 1.25|round(1) }}", "  a  |a  |a\n  b|1.2"),
        ("{{ [1, 2, 3]|batch(2, 'x')|list }}{{ [1, 2, 3]|slice(2)|list }}", "[[1, 2], [3, 'x']][[1, 2], [3]]"),
        ("{{ 'a b c'|wordwrap(3) }}", "a b\nc"),
        ("{% for i in range(3) %}{{ i }}{% endfor %}", "012"),
        ("{{ {'a': 1}|tojson }}{{ 'a,b'.split(',')|join(' ') }}", '{"a": 1}a b'),
    ],
)  # fmt: skip
def test_what_templates_are_for_works(text: str, expected: str) -> None:
    assert compile_template(text).render({}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{{ 2**100000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 10**10 * 'a' }}",
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**9 }}",
        "{{ range(10**9)|list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10**9) }}",
        "{{ '{a:>{w}}'.format_map({'a': 1, 'w': 10**9}) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'|center(width=10**9) }}",
        "{{ 'a\nb'|indent(10**9) }}",
        "{{ [1]|batch(10**9, 'x')|list }}",
        "{{ (2).to_bytes(10**10, 'big') }}",
        "{% set ns = namespace(x='a' * 10) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ (1).__class__.__mro__ }}",
        "{{ text.__class__ }}",
        "{{ lipsum() }}",
        "{{ missing }}",
    ],
)
def test_absurd_sizes_and_ways_out_of_the_sandbox_are_errors_at_once(text: str) -> None:
    template = compile_template(text)
    started = time.process_time()

    with pytest.raises((jinja2.TemplateError, OverflowError)):
        template.render({"text": "a"})
    assert time.process_time() - started < 5  # seconds, where it would be minutes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ x", "line 1"),
        ("a\nb {% if %}", "line 2"),
        ("{% include 'x' %}", "cannot include"),
        ("{% import 'x' as y %}", "cannot include"),
        ("a\n{% from 'x' import y %}", "line 2"),
        ("{% extends 'x' %}", "cannot include"),
        ("{{ x|no_such_filter }}", "no_such_filter"),
        ("{% generation %}", "generation"),
    ],
)
def test_templates_that_cannot_work_are_refused_with_the_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match="--template") as raised:
        compile_template(text)
    assert words in str(raised.value)


def test_chat_template_with_the_tags_of_transformers_is_fine() -> None:
    check_chat_template(
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ raise_exception('no') }}{{ strftime_now('%d') }}{{ m|tojson }}{% break %}{% endfor %}"
    )


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{ a", "{% generation %}", "{% nonsense %}"])
def test_chat_template_that_does_not_parse_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--chat-template does not parse: .*line 1"):
        check_chat_template(text)
