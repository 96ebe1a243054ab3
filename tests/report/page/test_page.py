"""The HTML report as text: what is in the file before any browser sees it."""

import json
import re
from dataclasses import replace

import pytest

from pytest_torchmem.report.page import html
from pytest_torchmem.report.page.html import picture_page, run_page
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.measured import Rank
from tests.report.sample_run import picture, report_of, sample_run, window


def block(page, name):
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)
    return json.loads(match.group(1))


def test_nothing_in_the_page_is_fetched():
    page = run_page(sample_run())
    assert not re.search(r'(?:src|href|action)\s*=\s*["\']?\s*(?:https?:)?//', page)
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_a_page_of_one_rank_says_which():
    run = replace(sample_run(), rank=Rank(1, 2))
    assert '["rank","1 of 2"]' in run_page(run)
    assert '["rank",' not in run_page(sample_run())


def test_what_a_name_holds_cannot_end_the_data():
    page = run_page(sample_run())
    assert "<script>alert" not in page
    assert "tests/test_step.py::test_<script>alert('x')</script>&amp;" in [
        test["name"] for test in block(page, "torchmem-run")["tests"]
    ]


def test_each_test_s_inside_is_a_block_of_its_own():
    page = run_page(sample_run())
    tests = block(page, "torchmem-run")["tests"]
    assert len(tests) == len(sample_run().tests)
    failed = block(page, tests[0]["id"])["windows"][0]
    assert failed["baseline"]["total"] < failed["total"]
    rows = failed["differences"]
    assert "aten::_to_copy" in [operator for _, _, _, operator, *_ in rows]


def test_timelines_beyond_the_budget_are_left_out_and_said_so(monkeypatch):
    monkeypatch.setattr(html, "PICTURES_BUDGET_BYTES", 30_000)
    page = run_page(sample_run())
    tests = block(page, "torchmem-run")["tests"]
    windows = [w for test in tests for w in block(page, test["id"])["windows"]]
    assert windows[0]["picture"]
    assert windows[-1]["picture"] is None
    assert "left out" in windows[-1]["no_picture"]


def test_what_must_be_known_of_a_comparison_is_told():
    body = replace(window("a"), notice="30 % lower", reference="cpu-torch2.12", nearest="gpu-1")
    page = run_page(RunReport((report_of("a", body),)))
    (inside,) = block(page, "torchmem-test-0")["windows"]
    assert inside["remarks"] == [
        "30 % lower",
        "compared with the baseline of cpu-torch2.12, as --torchmem-baseline-from says",
        "there is no baseline for this environment; gpu-1 has one",
    ]


def test_a_reader_without_scripts_sees_the_numbers():
    page = run_page(sample_run())
    plain = page[page.index("<noscript>") : page.index("</noscript>")]
    assert "90.1 MiB" in plain
    assert "test_&lt;script&gt;" in plain


def test_an_estimated_number_is_named_so_without_scripts_too():
    body = window("a")
    body = replace(body, result=replace(body.result, estimated=True))
    page = run_page(RunReport((report_of("a", body),)))
    plain = page[page.index("<noscript>") : page.index("</noscript>")]
    assert "90.1 MiB (estimated)" in plain


def test_a_timeline_alone_is_a_page_too():
    page = picture_page(picture(), "cuda:0 <b>")
    assert "Memory timeline: cuda:0 &lt;b&gt;" in page
    assert block(page, "torchmem-timeline")["windows"][0]["total"] == max(picture().totals)


def test_a_timeline_of_nothing_is_a_page_too():
    empty = replace(picture(), times_ns=(), rows=(), change_count=0, levels={}, tracks=())
    assert "Nothing was recorded" in picture_page(empty, "cpu")


@pytest.mark.parametrize("count", [2_000])
def test_a_page_grows_by_little_for_each_plain_test(count):
    plain = report_of("a", replace(window("a"), picture=None))
    tests = tuple(replace(plain, test=f"t.py::test_{i}") for i in range(count))
    small = len(run_page(RunReport(tests[:1])))
    assert (len(run_page(RunReport(tests))) - small) / count < 5_000
