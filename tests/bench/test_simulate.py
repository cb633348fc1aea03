"""`cbgen simulate`: the figures of the reference examples, to the last digit, and the pictures drawn from them."""

import contextlib
import io
import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.bench.simulate import (
    Workload,
    format_report,
    format_timelines,
    parse_numbers,
    render_svg,
    row_name,
    simulate,
    simulate_policies,
)
from cbgen.cli import main
from tests.fuzzing import fuzz


def make_workload(lengths, slots=4, step_ms=50.0, **changes):
    values = {"prompt_lengths": [1] * len(lengths), "arrivals_ms": [0.0] * len(lengths), **changes}
    return Workload(lengths=lengths, slots=slots, step_ms=step_ms, **values)


FIVE_ROWS = [100, 20, 50, 200, 30]
ALTERNATING = [20, 200] * 50


def test_five_rows_static_and_continuous():
    workload = make_workload(FIVE_ROWS)
    static, continuous = simulate(workload, "static"), simulate(workload, "continuous")
    assert (static.num_steps, static.total_ms) == (230, 11_500)
    assert (continuous.num_steps, continuous.total_ms) == (200, 10_000)
    assert static.response_ms == [5_000, 1_000, 2_500, 10_000, 11_500]
    assert continuous.response_ms == [5_000, 1_000, 2_500, 10_000, 2_500]
    assert (static.mean_response_ms, continuous.mean_response_ms) == (6_000, 4_200)
    row_e = next(span for span in continuous.spans if span.row == 4)
    assert (row_e.start_ms, row_e.end_ms) == (20 * 50, 50 * 50)


def test_alternating_rows_static_continuous_ideal_and_longest_first():
    workload = make_workload(ALTERNATING)
    static, continuous, longest = simulate_policies(workload)
    assert (static.num_steps, static.total_ms, round(static.tokens_per_second)) == (5_000, 250_000, 44)
    assert (continuous.num_steps, continuous.total_ms, round(continuous.tokens_per_second)) == (2_840, 142_000, 77)
    assert (longest.num_steps, longest.total_ms) == (2_760, 138_000)
    assert workload.ideal_steps == 2_750


def test_the_command_prints_both_tables(capsys):
    main(["simulate", "--slots", "4", "--step-ms", "50", "--lengths", "100,20,50,200,30"])
    first = capsys.readouterr().out
    for text in ("11.5 s (230 steps)", "10.0 s (200 steps)", "6.0 s", "4.2 s", "row E answers 4.6x sooner"):
        assert text in first
    main(["simulate", "--slots", "4", "--step-ms", "50", "--lengths", "(20,200)*50"])
    second = capsys.readouterr().out
    for text in ("250.0 s (5,000 steps)", "142.0 s (2,840 steps)", "138.0 s (2,760 steps)", "44 tok/s", "77 tok/s"):
        assert text in second
    assert "ideal (no slot ever idle): 2,750 steps, 137.5 s, 80 tok/s, 1.8x static" in second


def test_arrivals_delay_a_row_and_an_idle_machine_waits_for_it():
    workload = make_workload([10, 10], slots=2, arrivals_ms=[0.0, 2_000.0])
    result = simulate(workload, "continuous")
    assert (result.num_steps, result.total_ms, result.response_ms) == (20, 2_500, [500, 500])


def test_prefill_costs_time_when_it_has_a_price():
    workload = make_workload([10], prompt_lengths=[100], prefill_ms_per_token=0.5)
    assert simulate(workload, "continuous").total_ms == 10 * 50 + 100 * 0.5


def test_each_row_costs_time_when_it_has_a_price():
    """The same tokens cost the same; static takes more steps for them."""
    workload = make_workload(FIVE_ROWS, row_ms=10.0)
    assert simulate(workload, "static").total_ms == 230 * 50 + sum(FIVE_ROWS) * 10
    assert simulate(workload, "continuous").total_ms == 200 * 50 + sum(FIVE_ROWS) * 10


def test_timelines_show_each_slot_and_where_it_idles():
    static, continuous, _ = simulate_policies(make_workload(FIVE_ROWS))
    lines = format_timelines([static, continuous], 4, width=23)  # half a second per character
    assert lines[1] == "  slot 0  |AAAAAAAAAA..........EEE|"
    assert lines[7] == "  slot 1  |BBEEE...............   |"


def test_the_svg_is_xml_with_every_row(tmp_path):
    simulations = simulate_policies(make_workload(FIVE_ROWS))
    root = ElementTree.fromstring(render_svg(simulations, 4))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 15
    assert "row E: 1.00 to 2.50 s" in titles
    main(["simulate", "--lengths", "5,5", "--svg", str(tmp_path / "slots.svg")])
    assert (tmp_path / "slots.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,2,3", [1, 2, 3]),
        ("(20,200)*2", [20, 200, 20, 200]),
        ("5*3, 1", [5, 5, 5, 1]),
        ("(1,2)*2,9", [1, 2, 1, 2, 9]),
    ],
)
def test_lengths_as_people_type_them(text, numbers):
    assert parse_numbers(text) == numbers


REFUSED_LENGTHS = [
    "x", "1,,2", "(1,2", "1;2", "1.2.3", "", "-5", "5,-5", "1.5", "0", "nan", "inf", "1e3", ".", "()", "(,)", "5*",
    "5*0",
    "5*-1", "5*99999999999999999999", "9" * 400, "(1,2)*10001", "1000001", "50001*20", "٣",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED_LENGTHS)
def test_lengths_that_make_no_sense_or_no_end_are_refused(text, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "--lengths", text])
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message.startswith("cbgen: ")
    assert message.count("\n") == 1
    assert len(message) < 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("--slots", "0"),
        ("--slots", "-1"),
        ("--slots", "1000000000"),
        ("--slots", "1.5"),
        ("--arrivals", "1,2,3"),
        ("--arrivals=-1"),
        ("--arrivals", "9" * 20),
        ("--step-ms", "0"),
        ("--step-ms", "-5"),
        ("--step-ms", "nan"),
        ("--step-ms", "inf"),
        ("--step-ms", "1e-300"),
        ("--step-ms", "1e300"),
        ("--prefill-ms-per-token", "nan"),
        ("--prefill-ms-per-token", "inf"),
        ("--prefill-ms-per-token", "-1"),
        ("--prompt-lengths", "1.5"),
        ("--prompt-lengths", "0"),
        ("--prompt-lengths", "999999999999"),
        ("--prompt-lengths", "1,2,3"),
        ("--svg", "/nowhere/x.svg"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, capsys):
    arguments = [arguments] if isinstance(arguments, str) else arguments
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "--lengths", "5,5", *arguments])
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message.startswith("cbgen: ")
    assert message.count("\n") == 1


def test_many_slots_of_long_rows_are_refused_before_memory_is_taken(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "--lengths", "900000", "--slots", "1000"])
    assert exit_.value.code == 2
    assert "--slots" in capsys.readouterr().err


NUMBERS = st.integers(1, 40) | st.floats(0, 50).map(lambda number: round(number, 2))
TEXTS = st.lists(NUMBERS, max_size=4).map(lambda numbers: ",".join(map(str, numbers))) | st.text(
    "0123456789.,()*- enaif", max_size=8
)


@fuzz(100)
@given(TEXTS, TEXTS, TEXTS, st.sampled_from(["1", "3", "0", "-2", "x"]), st.floats().map(str) | TEXTS)
def test_whatever_is_typed_the_answer_is_a_table_or_one_sentence(lengths, prompts, arrivals, slots, step_ms):
    arguments = [f"--lengths={lengths}", f"--prompt-lengths={prompts or 1}", f"--arrivals={arrivals or 0}"]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["simulate", *arguments, f"--slots={slots}", f"--step-ms={step_ms or 50}"])
        except SystemExit as exit_:
            code = exit_.code
    if code == 0:
        assert "speed-up" in out.getvalue()
        assert err.getvalue() == ""
    else:
        assert code == 2
        assert err.getvalue().startswith("cbgen: ")
        assert out.getvalue() == ""


@fuzz(60)
@given(st.data(), st.integers(1, 12), st.integers(1, 5), st.floats(0.001, 1e9), st.floats(0, 1e6))
def test_every_row_gets_its_tokens_in_one_slot_at_a_time(data, num_rows, slots, step_ms, prefill):
    def rows(values):
        return data.draw(st.lists(values, min_size=num_rows, max_size=num_rows))

    workload = make_workload(
        rows(st.integers(1, 15)), slots, step_ms, prompt_lengths=rows(st.integers(1, 15)),
        arrivals_ms=rows(st.floats(0, 1e12)), prefill_ms_per_token=prefill,
    )  # fmt: skip
    for simulation in simulate_policies(workload):
        assert sorted(span.row for span in simulation.spans) == list(range(num_rows))
        assert simulation.num_tokens == sum(workload.lengths)
        assert 0 < simulation.occupancy <= 1
        assert simulation.num_steps >= max(workload.lengths)
        for slot in range(slots):
            stays = sorted((span.start_ms, span.end_ms) for span in simulation.spans if span.slot == slot)
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(stays))
        for span in simulation.spans:
            assert span.start_ms >= workload.arrivals_ms[span.row]
    assert format_report(workload, simulate_policies(workload))
    assert ElementTree.fromstring(render_svg(simulate_policies(workload), slots)) is not None


def test_report_leaves_out_single_rows_when_there_are_many():
    workload = make_workload(ALTERNATING)
    assert not re.search(r"response A", format_report(workload, simulate_policies(workload)))


def test_row_names_go_on_past_z():
    assert [row_name(i) for i in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]
