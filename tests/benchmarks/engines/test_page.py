"""The page says what the records say; numbers of refusals lead to their messages."""

import datetime

from benchmarks.engines.cases import COMBINED, GROUP_SIZE, PADDED, SOURCES, Case, all_cases
from benchmarks.engines.measure import Record
from benchmarks.engines.page import Page
from benchmarks.engines.reasons import UNKNOWN, explain
from benchmarks.engines.table import Engine
from distribute.dialects.table import DIALECTS
from distribute.recipe import make_recipe
from distribute.scheme import PRESETS

ENGINES = [
    Engine("vllm", "vLLM, CPU", "1.0", "vllm_cpu"),
    Engine("vllm-emulated", "vLLM, emulated", "1.0", "vllm_cpu", after="vllm"),
    Engine("rust", "Rust", "2.0", "mistral"),
    Engine("parser", "Parser", "3.0", "vllm_config", parses=True),
]
CASES = [*SOURCES, Case("fp8", "modelopt"), Case("int8", "modelopt"), Case("w4a8", "compressed-tensors")]


def rows(*records: Record, refused: dict[tuple[str, str], str] | None = None) -> dict[str, list[str]]:
    """The cells of each case, and the lines of refusals under "refusals"."""
    sources = [
        Record("bf16", "", "vllm", "", answer=" Paris.", perplexity=20.0, tokens=100),
        Record("bf16", "", "rust", "", answer=" Paris."),
    ]
    page = Page(CASES, ENGINES, {record.key: record for record in (*sources, *records)}, refused or {})
    text = page.make_text(prompt="Hello", date=datetime.date(2026, 1, 2))
    assert "2026-01-02" in text and "(100 tokens" in text and "vLLM, CPU 1.0; Rust 2.0; Parser 3.0." in text
    found = {"refusals": [line for line in text.splitlines() if line[:2] in ("1.", "2.", "3.")]}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| |"):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 3
            found[name] = cells
    return found


def test_a_run_shows_how_much_the_perplexity_rose_in_the_same_engine() -> None:
    found = rows(Record("fp8", "modelopt", "vllm", "", answer=" Paris, yes", perplexity=20.5, tokens=100))
    assert found["bf16"] == ["20.00", "✓", "-"]
    assert found["fp8"] == ["+2.5 %", "-", "-"]


def test_an_answer_that_begins_otherwise_is_shown() -> None:
    found = rows(
        Record("fp8", "modelopt", "rust", "", answer=" a|b\nc"),
        Record("int8", "modelopt", "rust", "", answer=""),
    )
    assert found["fp8"] == ["-", '✓ "a/b c"', "-"]
    assert found["int8"] == ["-", '✓ ""', "-"]


def test_a_refusal_points_to_its_message_and_what_ran_with_help_stands_behind_it() -> None:
    found = rows(
        Record("fp8", "modelopt", "vllm", "", error="ValueError: no\n kernel `a`"),
        Record("fp8", "modelopt", "vllm-emulated", "", answer=" Paris.", perplexity=21.0),
        Record("int8", "modelopt", "vllm", "", error="ValueError: no\n kernel `a`"),
        Record("fp8", "modelopt", "parser", "", parsed="CompressedTensorsW8A8Fp8"),
        Record("int8", "modelopt", "parser", "", error="KeyError: INT8"),
    )
    assert found["fp8"] == ["[1] (+5.0 %)", "-", "reads: W8A8Fp8"]
    assert found["int8"] == ["[1]", "-", "[2]"]
    assert found["refusals"] == [
        f"1. vLLM, CPU: `ValueError: no kernel 'a'`<br>{UNKNOWN}",
        f"2. Parser: `KeyError: INT8`<br>{UNKNOWN}",
    ]


def test_a_message_is_told_once_wherever_in_a_file_it_points_and_not_again_when_help_did_not_help() -> None:
    found = rows(
        Record("fp8", "modelopt", "vllm", "", error="no kernel at line 7 column 1"),
        Record("fp8", "modelopt", "vllm-emulated", "", error="no kernel at line 7 column 1"),
        Record("int8", "modelopt", "vllm", "", error="no kernel at line 8 column 22"),
    )
    assert found["fp8"][0] == found["int8"][0] == "[1]"
    assert found["refusals"] == [f"1. vLLM, CPU: `no kernel at line 7 column 1`<br>{UNKNOWN}"]


def test_an_engine_that_fails_after_its_answer_shows_both() -> None:
    found = rows(Record("fp8", "modelopt", "vllm", "", answer=" Paris.", error="not done in 300 s"))
    assert found["fp8"][0] == "✓ [1]"
    assert "Too slow" in found["refusals"][0]


def test_a_recipe_that_this_project_refuses_is_told_and_not_tried() -> None:
    found = rows(refused={("w4a8", "compressed-tensors"): "no such form"})
    assert found["w4a8"] == ["[1]", "-", "-"]
    assert found["refusals"] == [f"1. nogather: `no such form`<br>{UNKNOWN}"]


def test_every_preset_is_tried_in_every_dialect_with_a_group_size_that_fits_the_model() -> None:
    cases = all_cases()
    assert tuple(cases[:2]) == SOURCES
    recipes = len(PRESETS) + len(COMBINED) + len(PADDED)
    assert len({case.key for case in cases}) == len(cases) == 2 + recipes * len(DIALECTS)
    for case in cases[2:]:
        preset = PRESETS[case.recipe["preset"]]
        if case.dialect not in preset.refused and "symmetric" not in case.recipe:
            make_recipe(case.recipe | {"dialect": case.dialect})
        has_groups = case.recipe["preset"].startswith(("int4", "w4a8")) and not case.padded
        assert (case.recipe.get("group_size") == GROUP_SIZE) == has_groups


def test_a_known_message_is_explained() -> None:
    assert "AMX" in explain("ValueError: Failed to find a kernel: CPUFp8 requires AMX tile support")
    assert explain("ModelOpt currently only supports: FP8 in sglang.").startswith("SGLang")
    assert explain("what is this") == UNKNOWN


def test_a_padded_model_is_compared_with_the_padded_source() -> None:
    case = Case("fp8_block", "modelopt", padded=True)
    records = [
        Record("bf16", "", "vllm", "", answer=" Paris", perplexity=20.0),
        Record("bf16, padded", "", "vllm", "", answer=" Paris", perplexity=10.0),
        Record("fp8_block", "modelopt", "vllm", "", answer=" Paris", perplexity=11.0),
    ]
    page = Page([*SOURCES, case], ENGINES, {record.key: record for record in records})
    assert "| fp8_block | +10.0 % |" in page.make_text(prompt="", date=datetime.date(2026, 1, 2))
