import dataclasses
import re
import types
from html.parser import HTMLParser
from importlib import resources

import pytest

from ernie_jax.plan.comparison import Comparison
from ernie_jax.plan.plan import make_plan
from ernie_jax.plan.report import choice_sentence, render_report, write_report
from ernie_jax.plan.report_figures import memory_bars, pipeline_simulation, scatter, seconds_text, step_line, timetable
from ernie_jax.plan.svg import Scale, element

GIB = 2**30
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements of a page as (tag, attributes, text so far), with every end checked against its begin."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"attribute twice in {tag}"
        found = types.SimpleNamespace(tag=tag, attrs=dict(attrs), text="")
        self.elements.append(found)
        if tag not in VOID:
            self.open.append(found)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        for found in self.open:
            found.text += data

    def all(self, tag, kind=None):
        return [e for e in self.elements if e.tag == tag and (kind is None or kind in (e.attrs.get("class") or "").split())]

    def section(self, name):
        return next(e for e in self.elements if e.attrs.get("id") == name)


def share(value):
    assert value.endswith("%")
    return float(value[:-1]) / 100


@pytest.fixture(scope="module")
def plan():
    mesh = {"pipeline": 4, "data": 2, "expert": 2, "tensor": 1}
    return make_plan("ernie-4.5-21b-a3b", "h100:16", mesh=mesh, schedule="interleaved", virtual_stages=2, zero=1)


@pytest.fixture(scope="module")
def page(plan):
    return Page(render_report(plan))


def test_template_is_part_of_the_package():
    assert resources.files("ernie_jax.plan").joinpath("report.html.jinja").is_file()


def test_nothing_is_loaded_from_anywhere(plan, page):
    text = render_report(plan)
    assert not [e for e in page.elements if e.tag in ("script", "link", "img", "iframe", "object", "embed")]
    assert not [
        name for e in page.elements for name in e.attrs if name in ("src", "href", "xlink:href", "srcset") or name.startswith("on")
    ]
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\s\"<]*", text)) <= {"http://www.w3.org/2000/svg"} | set(
        re.findall(r"https?://[^\s\"<]*", " ".join(plan.topology.sources.values()))
    )


def test_page_tells_its_language_width_and_dark_colours(page):
    assert page.all("html")[0].attrs["lang"] == "en"
    metas = {e.attrs.get("name"): e.attrs.get("content") for e in page.all("meta")}
    assert metas["viewport"].startswith("width=device-width") and metas["color-scheme"] == "light dark"
    style = page.all("style")[0].text
    assert "prefers-color-scheme: dark" in style and "@media print" in style
    ids = [e.attrs["id"] for e in page.elements if "id" in e.attrs]
    assert len(set(ids)) == len(ids)


def test_the_choice_in_a_sentence_and_figures(plan, page):
    shown = plan.choice
    said = page.section("sentence").text
    assert said == choice_sentence(plan)
    assert "pipeline 4 x data 2 x expert 2" in said and f"{shown.memory.bytes / GIB:.1f} of 74.5 GiB" in said
    assert f"{shown.time.mfu:.1%}" in page.all("section", "tiles")[0].text
    assert "16 in 2 nodes" in page.section("choice").text


def test_memory_bars_have_the_bytes_of_each_stage(plan):
    shown, capacity, budget = plan.choice, float(plan.topology.memory_bytes), plan.budget
    bars = memory_bars(shown.memory.stages, capacity, budget)
    assert len(bars) == 4
    full = max(1.02 * capacity, shown.memory.bytes)
    for stage, drawn in zip(shown.memory.stages, bars, strict=True):
        drawing = Page(drawn)
        pieces = {e.attrs["class"]: e for e in drawing.all("rect")}
        for name, size in stage.parts.items():
            if size > 0:
                assert share(pieces[f"c-{name}"].attrs["width"]) * full == pytest.approx(size, rel=1e-4)
                assert f"{name}: {size / GIB:.2f} GiB" in pieces[f"c-{name}"].text
        taken = sum(share(e.attrs["width"]) for kind, e in pieces.items() if kind != "free")
        assert taken * full == pytest.approx(stage.bytes, rel=1e-4)
        assert share(pieces["free"].attrs["width"]) * full == pytest.approx(max(0, capacity - stage.bytes), rel=1e-3)
        assert share(drawing.all("line", "budget")[0].attrs["x1"]) * full == pytest.approx(budget, rel=1e-4)


def test_bars_of_unequal_stages_share_a_scale():
    stages = [types.SimpleNamespace(stage=i, bytes=size, parts={"parameters": size}) for i, size in enumerate((100.0, 400.0))]
    small, large = (share(Page(b).all("rect", "c-parameters")[0].attrs["width"]) for b in memory_bars(stages, 200.0, 150.0))
    assert large == pytest.approx(1) and small == pytest.approx(0.25)


def test_time_line_adds_up_to_the_step(plan):
    time = plan.choice.time
    pieces = Page(step_line(time)).all("rect")
    assert len(pieces) == len(time.parts)
    for kind, seconds in (("compute", time.compute), ("exposed", time.exposed), ("bubble", time.bubble), ("hidden", time.hidden)):
        drawn = sum(share(e.attrs["width"]) for e in pieces if f"k-{kind}" in e.attrs["class"].split())
        assert drawn == pytest.approx(seconds / time.seconds, abs=1e-4)
    ends = [share(e.attrs["x"]) + share(e.attrs["width"]) for e in pieces if "k-hidden" not in e.attrs["class"]]
    assert ends == sorted(ends) and ends[-1] == pytest.approx(1, abs=1e-4)


def test_timetable_draws_all_work_and_the_waiting(plan):
    run = plan.choice.run
    simulation = pipeline_simulation(run, plan.topology)
    drawn = Page(timetable(simulation))
    assert len(drawn.all("rect", "idle")) == 4
    pieces = [piece for path in drawn.all("path") for piece in re.findall(r"M(\d+) (\d+)H(\d+)", path.attrs["d"])]
    # The forward of the last of 8 virtual stages is part of its backward.
    assert len(pieces) == run.parts * (7 + 8)
    busy = sum(int(right) - int(left) for left, _, right in pieces) / (4 * 10000)
    assert busy == pytest.approx(1 - simulation.bubble, abs=0.01)
    half = Page(timetable(simulation, until=0.5, numbers=True))
    assert 0 < len(half.all("text")) <= len(pieces)


def test_scatter_places_every_candidate(plan):
    others = make_plan("ernie-4.5-21b-a3b", "h100:8", mesh={"pipeline": 1, "tensor": 1})
    drawn = Page(scatter(others.considered, others.choice, float(others.topology.memory_bytes), others.budget))
    points = drawn.all("circle")
    assert len(points) == len(others.considered) + 1
    for candidate, point in zip(others.considered, points, strict=False):
        assert point.attrs["class"] == ("fits" if candidate.fits else "lost")
        assert seconds_text(candidate.time.seconds) in point.text and f"{candidate.memory.bytes / GIB:.1f} GiB" in point.text
        assert candidate.reason in point.text
    places = sorted((c.time.seconds, share(p.attrs["cx"])) for c, p in zip(others.considered, points, strict=False))
    assert [at for _, at in places] == sorted(at for _, at in places) and 0 <= places[0][1] <= places[-1][1] <= 1
    limit = share(drawn.all("line", "budget")[0].attrs["y1"])
    for candidate, point in zip(others.considered, points, strict=False):
        assert (share(point.attrs["cy"]) < limit) == (candidate.memory.bytes > others.budget)
    assert (
        points[-1].attrs["class"] == "choice"
        and points[-1].attrs["cx"] == points[others.considered.index(others.choice)].attrs["cx"]
    )


def test_tables_have_what_lost_what_is_sent_and_every_source(plan, page):
    runners = page.section("runners-up").text
    assert all(other.reason in runners for other in plan.alternatives)
    sent = page.section("collectives").text
    assert plan.collectives and all(use.kind in sent and f"{use.count:,.0f}" in sent for use in plan.collectives)
    rests = page.section("constants").text
    assert all(name in rests and plan.topology.sources[name] in rests for name in plan.topology.constants)
    assert "450 GB/s" in rests and "989.4 TFLOP/s" in rests and "74.5 GiB" in rests
    parts = page.section("time").text
    assert all(part.name in parts for part in plan.choice.time.parts)


def test_compiled_figures_are_set_beside_the_prediction(plan):
    rows = [Comparison("memory of a device", 52.0, 50.0, "GiB"), Comparison("all-to-all over expert", 3 * GIB, 4 * GIB, "bytes")]
    rows.append(Comparison("all-gather over data", 7, 0, "count"))
    section = Page(render_report(dataclasses.replace(plan, compiled=types.SimpleNamespace(rows=rows))))
    text = section.section("compiled").text
    for figure in ("52 GiB", "50 GiB", "+4.0%", "3 GiB", "4 GiB", "-25.0%", "only predicted"):
        assert figure in text
    assert len(section.all("tr", "far")) == 2
    assert not [e for e in Page(render_report(plan)).elements if e.attrs.get("id") == "compiled"]


def test_names_are_escaped(plan):
    evil = '<script>alert("1")</script>&amp;'
    topology = dataclasses.replace(plan.topology, sources=dict.fromkeys(plan.topology.constants, evil))
    text = render_report(dataclasses.replace(plan, model=evil, topology=topology))
    page = Page(text)
    assert not page.all("script") and page.all("h1")[0].text.startswith(evil)
    assert element("text", '"<&', x='"<&') == '<text x="&#34;&lt;&amp;">&#34;&lt;&amp;</text>'


def test_where_nothing_fits_the_nearest_miss_is_shown():
    plan = make_plan("ernie-4.5-300b-a47b", "h100:8", mesh={"pipeline": 1})
    page = Page(render_report(plan))
    assert plan.choice is None and "does not fit" in page.all("h1")[0].text
    assert page.section("sentence").text.startswith("Nothing fits: ")
    assert plan.advice in " ".join(e.text for e in page.all("header"))
    assert not page.all("circle", "choice") and not [e for e in page.elements if e.attrs.get("id") == "pipeline"]


def test_one_device_talks_to_nobody():
    text = render_report(make_plan("quickstart", "h100:1", seq_len=512))
    assert "one device talks to nobody" in Page(text).section("collectives").text


def test_file_is_written_with_its_folder(plan, tmp_path):
    path = write_report(plan, tmp_path / "new" / "plan.html")
    assert path == tmp_path / "new" / "plan.html" and path.read_text(encoding="utf-8") == render_report(plan)


@pytest.mark.parametrize("name", ["plan.txt", "plan", "."])
def test_other_names_are_refused(plan, tmp_path, name):
    with pytest.raises(ValueError, match=r"expected the name of a file that ends with \.html"):
        write_report(plan, tmp_path / name)


def test_scales_and_their_ticks():
    linear = Scale.around([10.0, 30.0], from_zero=True)
    assert not linear.logarithmic and linear(0) == 0 and 0.9 < linear(30.0) < 1
    assert linear.ticks() == [0, 10, 20, 30] or linear.ticks() == [0, 5, 10, 15, 20, 25, 30]
    wide = Scale.around([1.0, 1000.0])
    assert wide.logarithmic and wide(10) - wide(1) == pytest.approx(wide(100) - wide(10))
    assert wide.ticks() == [1, 10, 100, 1000]
    assert 0 < Scale.around([5.0, 5.0])(5.0) < 1


def test_durations_in_units_that_suit():
    assert [seconds_text(s) for s in (1234.5, 12.34, 0.0123, 1.9e-6)] == ["1,234 s", "12.3 s", "12.3 ms", "1.9 µs"]
