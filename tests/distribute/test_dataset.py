"""Samples are a pure function of text, tokenizer and seed; every unusable input is refused in one sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from distribute.dataset import Samples, batches, digest_of, read_samples
from distribute.errors import DataError
from tests.models import make_tokenizer

#: Word number n of the tiny vocabulary is "w<n>" and has the id n + 3.
WORDS = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(200))]
FIRST = 3


def make_folder(folder: Path, *, begin: bool = False, chat_template: str | None = None, **config: Any) -> Path:
    """A checkpoint folder without weights: config.json and a tokenizer of one token a word without a pad token."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<s>"} | ({"eos_token": "</s>"} if begin else {})
    folder.mkdir(parents=True, exist_ok=True)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)
    made.save_pretrained(folder)
    limits = {"vocab_size": len(WORDS), "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(limits | config))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def ids(samples: Samples) -> list[list[int]]:
    """Word numbers of each sample."""
    return [(sample - FIRST).tolist() for sample in samples.tokens]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestText:
    def test_short_text_is_cut_into_consecutive_windows(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text(words(*range(10)))
        samples = read_samples(tmp_path / "t.txt", model=model, samples=3, sequence_length=3)
        assert ids(samples) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert samples.tokens[0].dtype == torch.int64
        assert samples.report["samples"] == 3 and samples.report["tokens"] == 9
        assert samples.report["data_digest"] == digest_of([s.tolist() for s in samples.tokens])

    def test_seed_alone_chooses_among_windows(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text(words(*range(200)))
        chosen = {
            seed: ids(read_samples(tmp_path / "t.txt", model=model, samples=4, sequence_length=10, seed=seed))
            for seed in (0, 0, 1, 2)
        }
        again = ids(read_samples(tmp_path / "t.txt", model=model, samples=4, sequence_length=10, seed=0))
        assert again == chosen[0]
        assert len({str(windows) for windows in chosen.values()}) == 3
        for windows in chosen.values():
            assert all(window == list(range(window[0], window[0] + 10)) for window in windows)
            assert windows == sorted(windows), "windows keep the order of the text"

    def test_fewer_windows_than_asked_are_all_taken_with_a_warning(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text(words(*range(25)))
        samples = read_samples(tmp_path / "t.txt", model=model, samples=8, sequence_length=10)
        assert len(samples.tokens) == 2
        assert samples.report["warnings"] == [f"2 of 8 samples: {tmp_path / 't.txt'} holds no more"]

    def test_text_shorter_than_a_window_is_one_sample(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text(words(*range(9)))
        assert ids(read_samples(tmp_path / "t.txt", model=model, sequence_length=64)) == [list(range(9))]

    def test_long_text_is_not_read_whole(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "t.txt").write_text(words(*(n % 200 for n in range(20_000))))
        monkeypatch.setattr("distribute.dataset.read_text", lambda path: pytest.fail("read whole"))
        samples = read_samples(tmp_path / "t.txt", model=model, samples=5, sequence_length=16)
        assert [len(sample) for sample in samples.tokens] == [16] * 5
        assert len({tuple(sample) for sample in ids(samples)}) == 5

    def test_text_of_long_words_still_gives_all_windows(self, model: Path, tmp_path: Path) -> None:
        """Blocks of 8 bytes a token hold no window here, so the text is read whole."""
        (tmp_path / "t.txt").write_text((" " * 20).join(f"w{n}" for n in range(200)))
        samples = read_samples(tmp_path / "t.txt", model=model, samples=20, sequence_length=10)
        assert ids(samples) == [list(range(n, n + 10)) for n in range(0, 200, 10)]

    def test_blocks_do_not_break_characters(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "m", vocab_size=400)
        make_tokenizer().save_pretrained(folder)
        (tmp_path / "t.txt").write_text("日本語のテキスト、" * 400, encoding="utf-8")
        samples = read_samples(tmp_path / "t.txt", model=folder, samples=9, sequence_length=12)
        assert len(samples.tokens) == 9

    def test_each_window_begins_as_the_tokenizer_begins_a_text(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "m", begin=True)
        (tmp_path / "t.txt").write_text(words(*range(9)))
        samples = read_samples(tmp_path / "t.txt", model=folder, samples=3, sequence_length=4)
        assert [sample.tolist() for sample in samples.tokens] == [[1, n, n + 1, n + 2] for n in (3, 6, 9)]

    def test_folder_of_text_files_is_one_text(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "b.txt").write_text(words(4, 5))
        (tmp_path / "d" / "a.txt").write_text(words(0, 1, 2, 3))
        samples = read_samples(tmp_path / "d", model=model, samples=2, sequence_length=3)
        assert ids(samples) == [[0, 1, 2], [3, 4, 5]]


class TestRows:
    ROWS: tuple[dict[str, Any], ...] = (
        {"text": "w1 w2 w3"}, {"content": "w4"}, {"messages": [{"role": "user", "content": "w5 w6"}]},
        {"text": " ", "content": "w7 w8 w9 w10 w11"}, {"other": "w12"},
    )  # fmt: skip
    EXPECTED = ([1, 2, 3], [4], [5, 6], [7, 8, 9, 10])

    def test_jsonl_rows_keep_their_length_and_are_cut(self, model: Path, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", list(self.ROWS))
        assert ids(read_samples(path, model=model, samples=4, sequence_length=4)) == list(self.EXPECTED)

    def test_parquet_gives_what_jsonl_gives(self, model: Path, tmp_path: Path) -> None:
        jsonl = write_rows(tmp_path / "t.jsonl", list(self.ROWS))
        parquet.write_table(pyarrow.Table.from_pylist([
            {"text": None, "content": None, "messages": None, "id": 7} | row for row in self.ROWS
        ]), tmp_path / "t.parquet", row_group_size=2)  # fmt: skip
        for seed in range(4):
            options = {"model": model, "samples": 2, "sequence_length": 4, "seed": seed}
            expected = read_samples(jsonl, **options)
            assert read_samples(tmp_path / "t.parquet", **options).report == expected.report | {
                "warnings": [w.replace(".jsonl", ".parquet") for w in expected.report["warnings"]]
            }

    def test_rows_of_several_files_are_counted_through(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        write_rows(tmp_path / "d" / "1.jsonl", [{"text": words(n)} for n in range(5)])
        write_rows(tmp_path / "d" / "2.jsonl", [{"text": words(n)} for n in range(5, 8)])
        assert ids(read_samples(tmp_path / "d", model=model, samples=8)) == [[n] for n in range(8)]

    def test_seed_chooses_rows(self, model: Path, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", [{"text": words(n)} for n in range(100)])
        first, second = (ids(read_samples(path, model=model, samples=10, seed=seed)) for seed in (0, 1))
        assert first == ids(read_samples(path, model=model, samples=10, seed=0)) != second
        assert first == sorted(first)

    def test_unusable_rows_are_replaced_by_others(self, model: Path, tmp_path: Path) -> None:
        rows = [{"text": words(n) if n % 10 == 0 else ""} for n in range(200)]
        samples = read_samples(write_rows(tmp_path / "t.jsonl", rows), model=model, samples=20)
        assert ids(samples) == [[n] for n in range(0, 200, 10)]

    def test_messages_go_through_the_chat_template(self, tmp_path: Path) -> None:
        template = "{% for m in messages %}w100 {{ m.content }} w101 {% endfor %}"
        folder = make_folder(tmp_path / "m", begin=True, chat_template=template)
        turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
        path = write_rows(tmp_path / "t.jsonl", [{"messages": turns}])
        assert ids(read_samples(path, model=folder)) == [[100, 1, 101, 100, 2, 101]]

    def test_template_that_refuses_a_conversation_names_the_row(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "m", chat_template="{{ raise_exception('roles must alternate') }}")
        path = write_rows(tmp_path / "t.jsonl", [{"text": "w1"}, {"messages": [{"role": "user", "content": "w1"}]}])
        with pytest.raises(DataError, match=r"t\.jsonl.*row 2.*roles must alternate"):
            read_samples(path, model=folder)


class TestAwkward:
    def test_rows_of_another_schema(self, model: Path, tmp_path: Path) -> None:
        rows = [{"text": ""}, {"text": "   "}, {"prompt": "w1 w2"}, {"text": None}, {"messages": []}]
        with pytest.raises(DataError, match="0 usable of 5 rows, expected a field named text"):
            read_samples(write_rows(tmp_path / "t.jsonl", rows), model=model, samples=64, sequence_length=32)

    def test_parquet_of_another_schema(self, model: Path, tmp_path: Path) -> None:
        parquet.write_table(pyarrow.table({"question": ["w1", "w2"]}), tmp_path / "t.parquet")
        with pytest.raises(DataError, match="0 usable of 2 rows, expected a field named text"):
            read_samples(tmp_path / "t.parquet", model=model)

    def test_three_usable_rows_of_64(self, model: Path, tmp_path: Path) -> None:
        rows = [{"text": words(*range(24))}] * 3 + [{"text": ""}] * 61
        samples = read_samples(write_rows(tmp_path / "t.jsonl", rows), model=model, samples=64, sequence_length=32)
        assert samples.report["samples"] == 3
        assert [w for w in samples.report["warnings"] if w.startswith("3 of 64 samples")]

    def test_rows_of_one_token(self, model: Path, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "t.jsonl", [{"text": words(n)} for n in range(64)])
        samples = read_samples(path, model=model, samples=64, sequence_length=32)
        assert samples.report["warnings"] == ["median length 1: samples so short measure little"]

    @pytest.mark.parametrize("begin", [False, True])
    def test_unknown_tokens_only(self, tmp_path: Path, begin: bool) -> None:
        folder = make_folder(tmp_path / "m", begin=begin)
        path = write_rows(tmp_path / "t.jsonl", [{"text": "zz yy xx " * 4}] * 4)
        warnings = read_samples(path, model=folder, samples=4).report["warnings"]
        assert warnings == ["share of unknown tokens 100%: the tokenizer does not know this text"]

    def test_broken_line_is_named(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_text('{"text": "w1 w2 w3"}\n{"text": "w4 w5\n{"text": "w6"}\n')
        with pytest.raises(DataError, match=r"t\.jsonl line 2 is not JSON"):
            read_samples(tmp_path / "t.jsonl", model=model, samples=64)

    @pytest.mark.parametrize("name", ["t.jsonl", "t.txt", "t.parquet"])
    def test_empty_file(self, model: Path, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=rf"{re.escape(name)} is empty"):
            read_samples(tmp_path / name, model=model)

    def test_white_space_only(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text(" \n" * 5000)
        with pytest.raises(DataError, match="nothing but white space"):
            read_samples(tmp_path / "t.txt", model=model)

    def test_missing_file(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no\.txt does not exist"):
            read_samples(tmp_path / "no.txt", model=model)

    @pytest.mark.parametrize("name", ["t.csv", "t"])
    def test_unsupported_ending(self, model: Path, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("w1")
        with pytest.raises(DataError, match=r"\.txt, \.jsonl, \.parquet"):
            read_samples(tmp_path / name, model=model)

    def test_folder_of_mixed_kinds(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("w1")
        (tmp_path / "b.jsonl").write_text("{}")
        with pytest.raises(DataError, match="several kinds"):
            read_samples(tmp_path, model=model)

    def test_damaged_parquet(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.parquet").write_bytes(b"PAR1 this is no parquet file PAR1")
        with pytest.raises(DataError, match=r"t\.parquet is not a readable parquet file"):
            read_samples(tmp_path / "t.parquet", model=model)

    @pytest.mark.parametrize("repeat", [1, 3000])
    def test_text_in_another_encoding(self, model: Path, tmp_path: Path, repeat: int) -> None:
        (tmp_path / "t.txt").write_bytes("Grüße w1 w2 ".encode("latin-1") * repeat)
        with pytest.raises(DataError, match="not UTF-8"):
            read_samples(tmp_path / "t.txt", model=model, samples=2, sequence_length=8)

    def test_sequence_longer_than_positions(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "t.txt").write_text("w1")
        with pytest.raises(DataError, match="sequence length 513 is longer than the model's 512 positions"):
            read_samples(tmp_path / "t.txt", model=model, sequence_length=513)

    def test_positions_of_a_nested_text_config(self, tmp_path: Path) -> None:
        nested = {"text_config": {"max_position_embeddings": 32}}
        folder = make_folder(tmp_path / "m")
        (folder / "config.json").write_text(json.dumps(nested))
        with pytest.raises(DataError, match="32 positions"):
            read_samples(tmp_path / "t.txt", model=folder, sequence_length=33)

    def test_token_outside_the_embedding(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "m", vocab_size=103)
        (tmp_path / "t.txt").write_text(words(99, 100))
        with pytest.raises(DataError, match="'w100' the id 103, but the model has 103 embeddings"):
            read_samples(tmp_path / "t.txt", model=folder)

    def test_pad_token_outside_the_embedding_does_no_harm(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "m")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        tokenizer.save_pretrained(folder)
        rows = [{"text": words(*range(n))} for n in (4, 9, 17, 30)]
        path = write_rows(tmp_path / "t.jsonl", rows)
        samples = read_samples(path, model=folder, samples=4)
        assert sorted(map(len, ids(samples))) == [4, 9, 17, 30]
        assert int(max(sample.max() for sample in samples.tokens)) < len(WORDS)

    def test_tokenizer_files_are_not_touched(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "m")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        (tmp_path / "t.txt").write_text(words(*range(100)))
        read_samples(tmp_path / "t.txt", model=folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    def test_checkpoint_without_tokenizer(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (tmp_path / "t.txt").write_text("w1")
        with pytest.raises(DataError, match=r"has no tokenizer that can be loaded.*fp8_dynamic"):
            read_samples(tmp_path / "t.txt", model=tmp_path / "m")

    def test_tokenizer_code_is_not_run(self, tmp_path: Path) -> None:
        folder = tmp_path / "m"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}})
        )
        (folder / "tokenization_own.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own:\n    @classmethod\n"
            "    def from_pretrained(cls, *args, **kwargs): raise ValueError('own code ran')\n"
        )
        (tmp_path / "t.txt").write_text("w1")
        with pytest.raises(DataError, match="needs its own code"):
            read_samples(tmp_path / "t.txt", model=folder)
        assert not (tmp_path / "ran").exists()


class TestBatches:
    def test_equal_lengths_only_and_longest_first(self) -> None:
        samples = [torch.full((length,), at) for at, length in enumerate([2, 3, 2, 2, 3, 5])]
        made = batches(samples, 2)
        assert [batch.tolist() for batch in made] == [
            [[5] * 5], [[1] * 3, [4] * 3], [[0] * 2, [2] * 2], [[3] * 2],
        ]  # fmt: skip

    def test_no_samples_no_batches(self) -> None:
        assert batches([], 8) == []


def test_digest_knows_where_samples_end() -> None:
    assert digest_of([[1, 2], [3]]) != digest_of([[1], [2, 3]])
    assert digest_of([[1, 2]]) == digest_of([(1, 2)])


def test_a_general_tokenizer_is_read_as_it_is_whatever_the_model_type(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", model_type="qwen2")  # whose usual tokenizer would make no token of words
    (tmp_path / "t.txt").write_text(words(4, 5, 6))
    assert ids(read_samples(tmp_path / "t.txt", model=folder, samples=1, sequence_length=3)) == [[4, 5, 6]]


def test_a_text_that_makes_no_token_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())  # no vocabulary and no unknown token
    folder = make_folder(tmp_path / "m")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (tmp_path / "t.txt").write_text("words that nobody knows")
    with pytest.raises(DataError, match="makes no token"):
        read_samples(tmp_path / "t.txt", model=folder, samples=1, sequence_length=3)
