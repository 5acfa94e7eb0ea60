"""What readers refuse, and that the message says where and what to do: wrong units and block sizes, unknown and broken files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trace_files import agentic_code, flat_sessions, lines, mooncake, sharegpt

from ppd_bench.core.errors import SpecError
from ppd_bench.workload.traces import READERS, open_trace
from ppd_bench.workload.traces.text_tokens import text_tokens


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(SpecError) as caught:
        for _ in open_trace(path, **options).rows():  # type: ignore[arg-type]
            pass
    return str(caught.value)


def hashed(folder: Path, *, block: int, per_s: float, n: int = 300, floor: bool = False) -> Path:
    """A Mooncake-like trace of 3 requests/s with another block size or unit of time."""
    entries: list[object] = []
    for i in range(n):
        length = 700 + 37 * i
        n_ids = length // block if floor else -(-length // block)
        ids = list(range(1000 * i, 1000 * i + n_ids))
        entries.append({"timestamp": i / 3 * per_s, "input_length": length, "output_length": 3, "hash_ids": ids})
    return lines(folder / "trace.jsonl", entries)


def test_a_wrong_block_size_is_found_on_the_first_rows(tmp_path: Path) -> None:
    path = hashed(tmp_path, block=16, per_s=1000)
    message = refusal(path)
    assert message.startswith(
        f"{path}:1: 44 block ids for a prompt of 700 tokens, but blocks of 512 tokens (tail rule ceil) would be 2"
    )
    assert "what fits: --block-tokens 16 --tail ceil" in message
    assert open_trace(path, block_tokens=16).format.block_tokens == 16


def test_a_wrong_tail_rule_is_found_on_the_first_rows(tmp_path: Path) -> None:
    path = hashed(tmp_path, block=512, per_s=1000, floor=True)
    assert "what fits: --block-tokens 512 --tail floor" in refusal(path)
    assert open_trace(path, tail="floor").format.tail == "floor"


@pytest.mark.parametrize(("per_s", "unit"), [(1.0, "s"), (1e6, "us")])
def test_a_wrong_unit_of_time_is_found_on_the_first_rows(per_s: float, unit: str, tmp_path: Path) -> None:
    path = hashed(tmp_path, block=512, per_s=per_s)
    message = refusal(path)
    assert message.startswith(f"{path}:1: ")
    assert f"--time-unit {unit}" in message
    rows = list(open_trace(path, time_unit=unit).rows())
    assert rows[3].arrival_s == pytest.approx(1.0)


def test_a_unit_that_the_user_states_is_believed(tmp_path: Path) -> None:
    path = hashed(tmp_path, block=512, per_s=1.0)
    assert next(iter(open_trace(path, time_unit="ms").rows())).arrival_s == 0.0


def test_dates_in_another_unit_are_refused(tmp_path: Path) -> None:
    path = flat_sessions(tmp_path).path
    path.write_text(path.read_text().replace("1760428258635837", "1760428258"))
    assert "is no date in us, but one in s" in refusal(path)


def test_a_block_size_of_agent_sessions_that_is_not_that_of_their_ids_is_refused(tmp_path: Path) -> None:
    path = agentic_code(tmp_path).path
    path.write_text(path.read_text().replace('"block_size": 64', '"block_size": 16'))
    assert "what fits: --block-tokens 64 --tail floor" in refusal(path)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n \n", "is empty"),
        ("unknown.jsonl", '{"a": 1}\n', "its first entries have the keys a; say which with --format"),
        ("unknown.csv", "x,y\n1,2\n", "its header is x, y"),
        ("unusable.json", '[{"id": "a", "conversations": []}]', "1 x dropped: conversation without messages"),
        ("torn.json", '[{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}, {"id', "entry 2"),
    ],
)  # fmt: skip
def test_files_that_are_no_trace_say_what_they_are(name: str, text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert told in refusal(path)
    assert str(path) in refusal(path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere.jsonl")
    assert "no trace in this folder" in refusal(tmp_path)


def test_utf_16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[]", encoding="utf-16")
    assert "UTF-16" in refusal(path)


def test_an_unknown_format_gets_the_closest_name(tmp_path: Path) -> None:
    message = refusal(mooncake(tmp_path).path, format="moncake")
    assert "did you mean 'mooncake'?" in message
    assert all(name in message for name in READERS)


def test_a_format_that_the_file_is_not_says_why_no_row_was_usable(tmp_path: Path) -> None:
    message = refusal(mooncake(tmp_path).path, format="sharegpt")
    assert "not a single usable row as sharegpt" in message
    assert "conversation is not a list of messages" in message


def test_options_that_mean_nothing_to_a_format_are_refused_together(tmp_path: Path) -> None:
    message = refusal(mooncake(tmp_path).path, tokenizer=Path("t"), block_tokens=0)
    assert "--tokenizer means nothing for the format mooncake" in message
    assert "--block-tokens 0: a block has at least 1 token" in message
    assert "--tail means nothing for the format sharegpt" in refusal(sharegpt(tmp_path).path, tail="ceil")
    assert "--time-unit 'h' is not known; allowed: s, ms, us" in refusal(mooncake(tmp_path).path, time_unit="h")


def test_a_folder_of_two_formats_is_refused(tmp_path: Path) -> None:
    mooncake(tmp_path)
    sharegpt(tmp_path)
    assert "a folder holds one format" in refusal(tmp_path)


def test_our_own_header_is_checked(tmp_path: Path) -> None:
    form = {
        "name": "x", "time_unit": None, "block_tokens": None, "tail": None, "id_scope": None, "row_means": "full_prompt",
        "loop": "timestamps", "token_count": "recorded",
    }  # fmt: skip
    row = {"row": 0, "request_id": "a", "prompt_tokens": 1, "output_tokens": 1}
    path = lines(tmp_path / "t.jsonl", [{"ppd_bench_trace": 2, "format": form}, row])
    assert "version 2 of the trace form; this one reads 1" in refusal(path)
    lines(path, [{"ppd_bench_trace": 1, "format": {**form, "tail": "round"}}, row])
    assert "tail='round'" in refusal(path)
    lines(path, [{"ppd_bench_trace": 1, "format": form}, row, {**row, "turn": 0}, {**row, "request_id": 5}, {"row": 3}])
    trace = open_trace(path)
    assert len(list(trace.rows())) == 1
    assert set(trace.counts.dropped) == {
        "turn is not a whole number of at least 1",
        "request_id is not a text",
        "request_id is missing",
    }


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 and then nothing of the sort")
    assert "damaged, or not Parquet" in refusal(path)
    pq.write_table(
        pa.table({"request_id": ["a"], "prompt_tokens": [1], "output_tokens": [1], "block_ids": [[1]]}), path
    )
    assert "columns missing or of another type" in refusal(path)


def test_a_gzip_stream_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    whole = gzip.compress(
        "\n".join(json.dumps({**row, "timestamp": 250 * i, "hash_ids": [i * i]}) for i in range(5000)).encode()
    )
    path.write_bytes(whole[: len(whole) // 2])
    message = refusal(path)
    assert message.startswith(f"{path}: its gzip stream is damaged or cut off")


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no tokenizer\.json there"):
        text_tokens(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    pytest.importorskip("tokenizers")
    with pytest.raises(SpecError, match=r"not a tokenizer\.json"):
        text_tokens(tmp_path)
