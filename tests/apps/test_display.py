"""What a run shows: no figure is cut off, at whatever width, and brackets are shown as they are."""

import io
import re

import pytest
from rich.console import Console

from jaxshard.apps.records.display import Display, axis_table, make_console, memory_table, say, step_table, step_totals
from jaxshard.inspect import Collective, Report

KINDS = ("params", "grads", "state")
AXES = {"pipeline": 512, "replica": 16, "data": 512, "tensor": 8}
LONGEST = " x ".join(AXES)


def shown(what, width):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(what)
    return console.file.getvalue()


def a_report(kind, trips_known=True):
    largest = Collective(kind, 141_999_999_999, 512, 1, ("bf16",), "x", trips_known=trips_known)
    return Report((largest, Collective("all-reduce", 4, 2, 123_456, ("f32",), "y")), largest.wire_bytes + 493_824)


@pytest.mark.parametrize("width", [120, 80])
def test_tables_show_every_figure_whole_on_one_line(width):
    largest = dict.fromkeys(KINDS, 141_999_999_999)
    memory = shown(memory_table("pipeline_parallel", largest, largest), width)
    assert len(re.findall(r"│ +142 GB │ +142 GB │ 1\.000 │", memory)) == 3
    assert "426 GB" in memory
    step = shown(step_table(a_report("collective-broadcast")), width)
    assert re.search(r"│ +512 │ +bf16 │ +1 │ +1 │ +142 GB │ +142 GB │", step)
    assert re.search(r"│ all-reduce +│ +2 │ +f32 │ +1 │ +123,456 │ +494 kB │ +494 kB │", step)
    shares = {axis: dict.fromkeys(KINDS, 1.0) for axis in AXES}
    axes = shown(axis_table(AXES, shares, {"data": 1.23e9, LONGEST: 4.56e12}), width)
    assert re.search(r"│ data +│ +512 │ +100% │ +100% │ +100% │ +1\.23 GB │", axes)
    assert "4,560 GB" in axes
    for text in (memory, step, axes):
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width


def test_a_table_in_a_narrow_terminal_takes_more_lines_and_loses_nothing():
    text = shown(step_table(a_report("collective-broadcast")), 44)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 44
    columns = zip(*(line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")), strict=True)
    joined = ["".join(part.strip() for part in column) for column in columns]
    assert joined[0] == "all-reducecollective-broadcast"
    assert joined[4] == "123,4561"


def test_totals_are_in_words_and_say_when_they_are_too_low():
    text = step_totals(a_report("all-reduce"))
    assert "wire bytes sent per device and step  283 GB" in text
    assert "too low" not in text
    assert "peak memory per device               unknown" in text
    assert "they count once" in step_totals(a_report("all-reduce", trips_known=False))


def test_lines_stay_whole_and_brackets_are_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    line = "in runs/exp[lr=3] [red]and[/red] :smile: 😀 " + "long " * 30
    say(make_console(), line)
    assert capsys.readouterr().out == f"{line}\n"


DEVICES = {"mfu": 0.4321, "peak_memory_bytes": 61.24e9}


@pytest.mark.parametrize("devices", [{}, DEVICES])
@pytest.mark.parametrize("skipped", [0, 1234])
def test_the_bar_of_a_long_run_shows_every_figure_in_80_columns(skipped, devices):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False, color_system=None)
    scalars = {"loss": 0.8554, "bits_per_byte": 1.2345, "tokens_per_second": 1_234_567.0, "step_seconds": 5.678}
    scalars |= {"learning_rate": 3e-4, "grad_norm": 1234.5, **devices}
    with Display(console, 18_998, 19_000) as display:
        display.advance(18_999)
        display.training(18_999, scalars | {"skipped_steps": skipped})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "…" not in text
    figures = ["18999/19000", "1.234 bits/byte  1,234,567 tokens/s", "5,678 ms/step  lr 3.0e-04  norm 1,234"]
    figures += ["MFU 43%  61.2 GB peak"] if devices else []
    figures += ["1234 skipped"] if skipped else []
    assert [figure for figure in figures if figure not in text] == []
    assert max(map(len, re.split(r"[\r\n]+", text))) <= 80


def test_a_line_shows_no_figure_that_is_not_known():
    console = Console(file=io.StringIO(), width=120, highlight=False, markup=False)
    scalars = {"loss": 2.0, "tokens_per_second": 9.0, "step_seconds": 0.5, "skipped_steps": 0, "learning_rate": 0.0}
    with Display(console, 0, 9) as display:
        display.training(1, scalars)
        display.training(2, scalars | {"grad_norm": 0.5, **DEVICES})
    assert console.file.getvalue().splitlines() == [
        "step 1/9   2.000 nats/token          9 tokens/s      500 ms/step  lr 0.0e+00",
        "step 2/9   2.000 nats/token          9 tokens/s      500 ms/step  lr 0.0e+00  norm    0.500  MFU  43%  "
        "61.2 GB peak",
    ]


LINES = [
    {"loss": 5.5, "bits_per_byte": 7.9, "grad_norm": 2.4, "step_seconds": 2.378, "tokens_per_second": 861.2},
    {"loss": 2.1, "bits_per_byte": 3.0, "grad_norm": 1e-3, "step_seconds": 0.00041, "tokens_per_second": 4_995_122.0},
    {"step_seconds": 0.41, "tokens_per_second": 4995.1},
    {"loss": 12.1, "grad_norm": 123_456.7, "step_seconds": 100.0, "tokens_per_second": 20.5},
]


def test_the_columns_of_the_lines_stand_still():
    console = Console(file=io.StringIO(), width=120, highlight=False, markup=False)
    with Display(console, 0, 1000) as display:
        for index, scalars in enumerate(LINES):
            display.training(10**index, scalars | {"learning_rate": 3e-4, "skipped_steps": 0, "mfu": 0.05})
    lines = console.file.getvalue().splitlines()
    for unit in (" tokens/s", " ms/step", "  lr ", "  MFU "):
        assert len({line.index(unit) for line in lines}) == 1, lines
    assert len({line.index("  norm ") for line in lines if "norm" in line}) == 1
    assert [len(line) for line in lines] == [len(lines[0])] * len(lines)


@pytest.mark.parametrize(("columns", "width"), [("0", 120), ("x", 120), ("", 120), ("90", 90)])
def test_a_width_that_is_none_is_not_taken(monkeypatch, columns, width):
    """COLUMNS=0 printed nothing."""
    monkeypatch.setenv("COLUMNS", columns)
    assert make_console().width == width
