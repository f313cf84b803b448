"""Which peer a recipe is compared with, and when it meets its target."""

import datetime

from benchmarks.makers import Case
from benchmarks.quality import all_cases
from benchmarks.quality_page import Judged, Page

OURS = Case("nogather", "int8", "modelopt")


def page(found: dict[Case, Judged], source: float = 20.0) -> Page:
    return Page(found, source, samples=4, tokens=1000)


def test_every_case_of_ours_has_a_peer_in_its_dialect() -> None:
    cases = all_cases()
    ours = {(case.preset, case.dialect) for case in cases if case.maker == "nogather"}
    assert ours == {(case.preset, case.dialect) for case in cases if case.maker != "nogather"}


def test_a_peer_with_another_scheme_is_not_compared_with() -> None:
    found = {
        OURS: Judged(22.0),
        Case("modelopt", "int8", "modelopt"): Judged(21.9),
        Case("llmcompressor", "int8", "compressed-tensors"): Judged(20.1),  # inputs token by token
    }
    assert page(found).beside(OURS) == 22.0 / 21.9 - 1


def test_the_best_peer_counts_whichever_its_dialect_where_the_scheme_is_one() -> None:
    ours = Case("nogather", "fp8_dynamic", "modelopt")
    found = {
        ours: Judged(21.0),
        Case("modelopt", "fp8_dynamic", "modelopt"): Judged(22.0),
        Case("llmcompressor", "fp8_dynamic", "compressed-tensors"): Judged(20.0),
    }
    assert page(found).beside(ours) == 21.0 / 20.0 - 1
    assert page(found).beside(ours, ["modelopt"]) == 21.0 / 22.0 - 1


def test_the_page_names_what_misses_its_target_and_what_failed() -> None:
    found = dict.fromkeys(all_cases(), Judged(20.0))
    worse, failed = Case("nogather", "fp8", "modelopt"), Case("llmcompressor", "mxfp4", "compressed-tensors")
    found |= {worse: Judged(20.2), failed: Judged(error="it has no such scheme")}
    found |= {Case("llmcompressor", "int4", "compressed-tensors"): Judged(19.0)}
    text = page(found).make_text(datetime.date(2026, 1, 1))
    rows = {tuple(row.split(" | ")[:2]): row for row in text.splitlines() if row.startswith("| ")}
    assert "+1.00% | +1.00% | **missed** |" in rows["| fp8", "modelopt"]
    assert "+0.00% | +0.00% | met |" in rows["| fp8_dynamic", "modelopt"]
    assert "+0.00% | +5.26% | met in its dialect |" in rows["| int4", "modelopt"]
    assert "mxfp4, compressed-tensors, by llmcompressor: `it has no such scheme`" in text


def test_a_search_that_does_not_help_is_said() -> None:
    found = dict.fromkeys(all_cases(), Judged(20.0)) | {Case("nogather", "int4_awq", "modelopt"): Judged(19.0)}
    searched = page(found).make_text(datetime.date(2026, 1, 1)).partition("## Searched")[2].splitlines()
    rows = [row for row in searched if "| modelopt | nogather |" in row]
    assert [row.rpartition("| ")[2] for row in rows] == ["better |", "**not better** |", "**not better** |"]


def test_a_peer_that_is_missing_or_not_measured_leaves_no_verdict() -> None:
    found = dict.fromkeys(all_cases(), Judged()) | {OURS: Judged(21.0)}
    assert page(found).beside(OURS) is None
    assert "| int8 | modelopt | 21.000 | +5.00% | modelopt | - | - | - | - |" in page(found).make_text(
        datetime.date(2026, 1, 1)
    )
