"""Plans as pictures: the bars are as long as the rows say, and the page says all that they do."""

import dataclasses
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from jaxshard import plan
from jaxshard.hardware import chips
from jaxshard.plan.pages import drawing
from jaxshard.plan.pages import html as pages
from jaxshard.system.text import size_in_words

MB = 1e6
NEAR = 30 * MB  # of memory: ddp does not fit, the others do
WIDTH = 1024


def compared(memory_bytes, candidates=None, num_devices=16):
    def loss(p, batch):
        x = batch @ p["in"]
        for block in p["blocks"]:
            x = jnp.tanh(x @ block["w"] + block["b"])
        return jnp.mean((x @ p["out"]) ** 2)

    def shaped(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {"w": shaped(WIDTH, WIDTH), "b": shaped(WIDTH)}
    params = {"in": shaped(10, WIDTH), "blocks": [block, block], "out": shaped(WIDTH, 10)}
    target = plan.Target(chips.chip("h100"), num_devices, memory_bytes)
    build = plan.building(loss, optax.adam(1e-3), params, shaped(4096, 10))
    return plan.compare(build, candidates or plan.side_by_side(target), target)


@pytest.fixture(scope="module")
def rows():
    found = compared(NEAR)
    assert [row.fits for row in found] == [False, True, True, True, True, True]
    return found


def with_memory(rows, memory_bytes):
    return [dataclasses.replace(r, target=dataclasses.replace(r.target, memory_bytes=memory_bytes)) for r in rows]


# The PNG.


def drawn(rows, path, **options):
    drawing.draw(rows, path, **{"title": "a title", **options})
    return imread(path)[..., :3]


def runs(picture, colour):
    """Bars of a colour: the most pixels in a line, of each group of lines that touch, from the top."""
    hits = (np.abs(picture - np.array(to_rgb(colour), np.float32)).max(-1) < 0.02).sum(axis=1)
    groups = np.split(hits, np.flatnonzero(np.diff((hits > 0).astype(int))) + 1)
    return [int(group.max()) for group in groups if group.max() > 0]


@pytest.mark.parametrize("kind", ["params", "state"])
def test_each_bar_is_as_long_as_its_row_says(rows, tmp_path, kind):
    # On a limit that all fit, so that nothing is hatched. The last run is the legend's.
    picture = drawn(with_memory(rows, 100 * MB), tmp_path / "plan.png")
    lengths = np.array(runs(picture, dict(zip(plan.KINDS, drawing.OF_MEMORY.values(), strict=True))[kind])[:-1])
    expected = np.array([row.prediction.memory[kind] for row in rows], float)
    assert len(set(expected)) > 1
    np.testing.assert_allclose(lengths / lengths[0], expected / expected[0], atol=2.5 / lengths[0])


def test_traffic_is_drawn_by_axes(rows, tmp_path):
    picture = drawn(rows, tmp_path / "plan.png")
    data, replica = (runs(picture, colour)[:-1] for colour in drawing.OF_TRAFFIC[:2])
    sent = [row.prediction.costs.wire_bytes_by_axes() for row in rows]
    assert len(data) == len(rows)
    assert len(replica) == sum("replica" in found for found in sent) == 2  # hsdp, and with its state over both
    assert replica[0] / data[-1] == pytest.approx(sent[-1]["replica"] / sent[-1]["data"], rel=0.1)
    assert data[-1] < data[0]


def test_a_bar_beyond_the_limit_is_marked(rows, tmp_path):
    def red(memory_bytes):
        picture = drawn(with_memory(rows, memory_bytes), tmp_path / "plan.png")
        return sum(runs(picture, drawing.BAD))

    none, one, all_rows = red(100 * MB), red(NEAR), red(5 * MB)
    assert none < one < all_rows


def test_what_is_beyond_the_limit_is_hatched(rows, tmp_path):
    def filled(memory_bytes):
        """The share of ddp's activations, the last part of its bar, that has their plain colour."""
        picture = drawn(with_memory(rows[:1], memory_bytes), tmp_path / "plan.png")[:220]  # above the legend
        hits = np.abs(picture - np.array(to_rgb(drawing.OF_MEMORY["activations"]), np.float32)).max(-1) < 0.02
        lines, columns = np.nonzero(hits)
        return hits.sum() / (np.ptp(lines) + 1) / (np.ptp(columns) + 1)

    assert filled(100 * MB) > 0.95
    assert filled(30 * MB) < 0.9


@pytest.mark.parametrize("count", [1, 5, 12])
def test_the_picture_grows_with_its_rows(rows, tmp_path, count):
    picture = drawn((rows * 3)[:count], tmp_path / "plan.png")
    height, width, _ = picture.shape
    assert width == 1680
    assert 250 + 40 * count < height < 350 + 60 * count
    assert len(runs(picture, "#0072b2")) == count + 1  # and the legend


def test_titles_are_no_mathematics(rows, tmp_path):
    assert drawn(rows, tmp_path / "plan.png", title="<b>& $\\frac{$").std() > 0.05


# The page.


class Parsed(HTMLParser):
    """Checks that tags are balanced, and keeps the texts, attributes and tables."""

    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.attributes, self.texts, self.tables = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append((dict(attrs).get("title", ""), []))

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1][1].append(data)

    def cells(self, table):
        """(text, tooltip) of each cell of each line."""
        return [[("".join(texts), tip) for tip, texts in line] for line in self.tables[table]]


def written(rows, path, title="a title", notes=()):
    pages.page(rows, path, title=title, notes=notes)
    return path.read_text(encoding="utf-8")


def bytes_in(tip):
    number, unit = tip.split()
    assert unit == "bytes"
    return float(number.replace(",", ""))


def test_the_page_needs_nothing_else(rows, tmp_path):
    page = written(rows, tmp_path / "plan.html")
    found = Parsed(page)
    assert "http" not in page
    assert "url(#" in page
    assert not re.search(r"url\((?!#)", page)
    assert not {"script", "link", "img", "iframe", "base", "object"} & set(found.seen)
    assert not {name for _, name, _ in found.attributes} & {"src", "href", "xlink:href", "srcset", "onclick", "onload"}


def test_all_texts_are_escaped(rows, tmp_path):
    hostile = "<b>&\"' </title><script>"
    found = Parsed(written(rows, tmp_path / "plan.html", title=hostile, notes=["<i>one & two", "three"]))
    assert "".join(found.texts).count(hostile) == 2  # the head's and the heading
    assert "<i>one & two" in found.texts
    assert not {"i", "script"} & set(found.seen)


def test_every_row_and_leaf_is_there(rows, tmp_path):
    found = Parsed(written(rows, tmp_path / "plan.html"))
    assert found.seen.count("details") == len(rows)
    for i, row in enumerate(rows):
        assert found.texts.count(row.candidate.name) == 6  # two charts, three tables, the details
        lines = found.cells(3 + i)[1:]
        expected = row.prediction.layout.rows()
        assert len(lines) == len(expected) == 19
        for line, (kind, leaf, shape, dtype, spec, num_bytes, why) in zip(lines, expected, strict=True):
            texts = [text for text, _ in line]
            assert texts[:5] == [kind, leaf, shape, dtype, spec]
            assert texts[-1] == why
            assert bytes_in(line[-2][1]) == int(num_bytes)


def test_cuts_are_drawn_and_told(rows, tmp_path):
    found = Parsed(written(rows, tmp_path / "plan.html"))
    zero1, zero3 = ({line[1][0]: line[5][0] for line in found.cells(table)[1:]} for table in (4, 6))
    assert zero1["in"] == zero1["out"] == zero1["blocks/0/w"] == zero3["blocks/0/b"] == "whole"
    assert zero1["0/mu/in"] == zero3["in"] == zero3["0/mu/in"] == "dim 1 in 16"  # 10 rows do not divide
    assert zero3["out"] == "\u2026dim 0 in 16"  # 8 stripes at most are drawn down


@pytest.mark.parametrize(
    ("ways", "lines", "part", "dots"),
    [
        ([], 0, (16, 16), False),
        ([1], 0, (64, 16), False),
        ([4], 3, (16, 16), False),
        ([1, 4], 3, (16, 34), False),
        ([4, 1], 3, (64, 8.5), False),
        ([1, 2, 1], 1, (64, 17), False),
        ([2, 4], 4, (16, 17), False),
        ([2, 1, 4], 4, (16, 17), False),
        ([1, 16], 15, (4, 34), False),
        ([1, 64], 11, (4, 34), True),
        ([64, 1], 5, (64, 4.25), True),
    ],
)
def test_a_cut_has_as_many_stripes_as_parts(ways, lines, part, dots):
    picture = pages._cut(ways)
    assert picture.count("M") == lines
    width, height = re.search(r'class="part" width="([\d.]+)" height="([\d.]+)"', picture).groups()
    assert (float(width), float(height)) == part
    assert ("\u2026" in picture) == dots


def test_figures_are_the_rows_own(rows, tmp_path):
    found = Parsed(written(rows, tmp_path / "plan.html"))
    memory, sent, times = (found.cells(i) for i in range(3))
    axes = [text.removeprefix("along ") for text, _ in sent[0][2:]]
    assert set(axes) == {"data", "replica", "replica x data"}
    for i, row in enumerate(rows, start=1):
        predicted, took = row.prediction, row.seconds
        expected = [*(predicted.memory[kind] for kind in plan.KINDS), predicted.peak_bytes, abs(row.excess_bytes)]
        assert [bytes_in(tip) for _, tip in memory[i][1:]] == expected
        expected = [predicted.wire_bytes, *(predicted.costs.wire_bytes_by_axes().get(a, 0.0) for a in axes)]
        assert [bytes_in(tip) for _, tip in sent[i][1:]] == expected
        expected = [took.total, took.overlapped, took.products, took.memory, took.links, took.host, took.waits]
        assert [float(tip.removesuffix(" s")) for _, tip in times[i][1:-1]] == expected
        assert times[i][-1][0] == took.bound
    assert memory[1][1][0] == f"{rows[0].prediction.memory['params'] / MB:.3g} MB"
    assert times[1][1][0] == f"{rows[0].seconds.total * 1e3:.3g} ms"


def test_the_largest_batch_is_shown_where_it_is_known(rows, tmp_path):
    some = [dataclasses.replace(rows[0], largest_batch=12288), *rows[1:]]
    head, first, second, *_ = Parsed(written(some, tmp_path / "plan.html")).cells(0)
    assert (head[-1][0], first[-1][0], second[-1][0]) == ("largest batch", "12,288 rows", "")


def bars(page):
    """(row's name, part) -> (tooltip's size, start, width) of each bar of the page's charts."""
    written = re.findall(r"<g><title>([^<]*), ([^,<]*): ([^<]*)</title>\s*<path d=\"([^\"]*)\"", page)
    found = {}
    for name, part, size, path in written:
        across = [float(x) for x, _ in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]
        assert (name, part) not in found
        found[name, part] = (size, min(across), max(across) - min(across))
    return found


def test_bars_of_the_page_are_to_scale(rows, tmp_path):
    found = bars(written(rows, tmp_path / "plan.html"))
    keys = [[(row.candidate.name, kind) for kind in plan.KINDS] for row in rows]
    starts, widths = (np.array([[found[key][i] for key in line] for line in keys]) for i in (1, 2))
    expected = np.array([[row.prediction.memory[kind] for kind in plan.KINDS] for row in rows], float)
    np.testing.assert_allclose(widths / widths[0, 0], expected / expected[0, 0], atol=1e-3)
    np.testing.assert_allclose(starts[:, 1:], (starts + widths)[:, :-1], atol=0.02)
    assert len(set(starts[:, 0])) == 1
    assert [found[key][0] for key in keys[0]] == [size_in_words(num_bytes) for num_bytes in expected[0]]
    sent = [found[row.candidate.name, "along data"][2] for row in rows]
    expected = [row.prediction.costs.wire_bytes_by_axes()["data"] for row in rows]
    np.testing.assert_allclose(np.array(sent) / sent[0], np.array(expected) / expected[0], atol=1e-3)


def test_the_charts_of_a_page_share_no_ids_and_name_none_that_is_not_there(rows, tmp_path):
    page = written(rows, tmp_path / "plan.html")
    ids = [value for _, name, value in Parsed(page).attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 10
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(ids)


def test_the_charts_follow_the_pages_colours(rows, tmp_path):
    charted = "".join(re.findall(r"<svg class=\"chart\".*?</svg>", written(rows, tmp_path / "plan.html"), re.S))
    colours = {*drawing.OF_MEMORY.values(), *drawing.OF_TRAFFIC, drawing.OTHERS}
    assert set(re.findall(r"#[0-9a-f]{6}", charted)) <= colours
    assert {"var(--ink)", "var(--bad)"} <= set(re.findall(r"var\(--\w+\)", charted))


@pytest.mark.parametrize(
    ("memory", "fitting", "line"),
    [(NEAR, 5, "limit 30 MB"), (100 * MB, 6, "limit 100 MB"), (5 * MB, 0, "limit 5 MB"), (80e9, 6, "far above")],
)
def test_the_limit_and_what_fits(rows, tmp_path, memory, fitting, line):
    page = written(with_memory(rows, memory), tmp_path / "plan.html")
    found = Parsed(page)
    fits = [line[-1][0] for line in found.cells(0)[1:]]
    assert sum(text.endswith(" free") for text in fits) == fitting
    assert sum(text.endswith(" too large") for text in fits) == len(rows) - fitting
    assert any(line in text for text in found.texts)
    assert ("beyond the limit" in page) == (fitting < len(rows))
    assert ('-limit"' in page) == (memory < 1e9)
    beyond = {name for name, part in bars(page) if part == "beyond the limit"}
    assert beyond == {row.candidate.name for row in rows if row.prediction.peak_bytes > memory}
    assert len(beyond) == len(rows) - fitting


def test_one_row_on_one_device(tmp_path):
    rows = compared(80e9, [plan.Candidate("ddp")], num_devices=1)
    assert rows[0].prediction.wire_bytes == 0
    assert Parsed(written(rows, tmp_path / "plan.html")).cells(1)[1] == [("ddp", ""), ("0 B", "0 bytes")]
    assert drawn(rows, tmp_path / "plan.png").std() > 0.05


def test_more_axes_than_colours_share_one(rows, monkeypatch):
    sent = {f"axis{i}": 10.0 + i for i in range(8)} | {"tiny": 0.01}
    costs = type("Costs", (), {"wire_bytes_by_axes": lambda self: sent})()
    shown = [type("Row", (), {"prediction": type("P", (), {"costs": costs, "wire_bytes": sum(sent.values())})()})]
    monkeypatch.setattr(drawing, "names_of", lambda rows: ["one"])
    chart = drawing.traffic_chart(shown)
    assert list(chart.parts) == [*(f"along axis{i}" for i in (7, 6, 5, 4, 3, 2)), "along 3 others"]
    assert chart.totals == [pytest.approx(sum(sent.values()))]
    assert len(chart.colours) == 7


# What cannot be drawn.


@pytest.mark.parametrize("show", [drawing.draw, pages.page])
def test_rows_of_one_target(rows, tmp_path, show):
    with pytest.raises(ValueError, match="rows: it is empty"):
        show([], tmp_path / "plan", title="")
    with pytest.raises(ValueError, match=r"rows: ddp is for 16 x h100.*of one target"):
        show([rows[1], *with_memory(rows[:1], 1e9)], tmp_path / "plan", title="")
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *((0, "0 B"), (7.875, "7.88 B"), (999, "999 B"), (999.6, "1 kB"), (262176, "262 kB"), (23584280, "23.6 MB")),
        *((16060522496, "16.1 GB"), (1344.5e9, "1,344 GB"), (999.96e6, "1 GB"), (-1344.5e9, "-1,344 GB")),
    ],
)
def test_sizes_have_units(num_bytes, text):
    assert size_in_words(num_bytes) == text
