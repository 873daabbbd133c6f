from __future__ import annotations

from pathlib import Path

import pytest

from strop.cli.quickstart.stages import _activation_lines
from strop.cli.quickstart.task import draw_words, write_task
from strop.data import DataConfig, PromptDataset, SftDataConfig, SftDataset, read_rows
from strop.data.tiny_model import make_tiny_tokenizer


def asked(row: dict) -> str:
    messages = row.get("messages") or row["prompt"]
    return str(messages[0]["content"])


def test_files_hold_the_task_in_the_fields_schema(tmp_path: Path) -> None:
    files = write_task(tmp_path, seed=0, num_train=30, num_val=10, num_sft=20)
    assert (files.train, files.val) == (tmp_path / "train.parquet", tmp_path / "val.parquet")
    train, val, sft = (read_rows([path]) for path in (files.train, files.val, files.sft))
    assert (len(train), len(val), len(sft)) == (30, 10, 20)
    for split, rows in (("train", train), ("val", val)):
        for index, row in enumerate(rows):
            word = asked(row).removeprefix("reverse: ")
            assert row == {
                "data_source": "strop/exact",
                "prompt": [{"role": "user", "content": f"reverse: {word}"}],
                "ability": "reversal",
                "reward_model": {"style": "rule", "ground_truth": "".join(reversed(word))},
                "extra_info": {"split": split, "index": index},
            }
    held_out = read_rows([files.sft_val])
    assert [asked(row) for row in held_out] == [asked(row) for row in val]
    for row in sft + held_out:
        word = asked(row).removeprefix("reverse: ")
        assert row["messages"][1] == {"role": "assistant", "content": "".join(reversed(word))}
    questions = [asked(row) for row in train + val + sft]
    assert len(set(questions)) == 60


def test_a_shell_that_does_not_know_the_command_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _activation_lines() == ["  source .venv/bin/activate"]
    strop = tmp_path / "strop"
    strop.touch(mode=0o755)
    assert _activation_lines() == []


def test_files_are_a_function_of_the_seed(tmp_path: Path) -> None:
    sizes = {"num_train": 30, "num_val": 10, "num_sft": 20}
    one = write_task(tmp_path / "one", seed=0, **sizes)
    two = write_task(tmp_path / "two", seed=0, **sizes)
    other = write_task(tmp_path / "other", seed=1, **sizes)
    for name in ("train", "val", "sft", "sft_val"):
        assert getattr(one, name).read_bytes() == getattr(two, name).read_bytes()
        assert getattr(one, name).read_bytes() != getattr(other, name).read_bytes()


def test_the_held_out_words_do_not_depend_on_the_other_sizes(tmp_path: Path) -> None:
    small = write_task(tmp_path / "s", seed=0, num_train=5, num_val=10, num_sft=3)
    large = write_task(tmp_path / "l", seed=0, num_train=500, num_val=10, num_sft=100)
    assert read_rows([small.val]) == read_rows([large.val])


def test_all_words_of_a_small_alphabet_but_the_palindromes() -> None:
    # 2 letters, 3 positions: aab abb baa bba; aaa aba bab bbb read the same backwards.
    assert sorted(draw_words(0, 4, min_letters=3, max_letters=3, alphabet="ab")) == [
        "aab",
        "abb",
        "baa",
        "bba",
    ]
    with pytest.raises(
        ValueError, match="5 different words were asked for, but 3 to 3 letters of 'ab' make 4"
    ):
        draw_words(0, 5, min_letters=3, max_letters=3, alphabet="ab")


def test_words_are_spread_over_the_alphabet() -> None:
    words = draw_words(0, 2000, min_letters=4, max_letters=4, alphabet="aeilnoprst")
    counts = [sum(word.count(letter) for word in words) for letter in "aeilnoprst"]
    assert sum(counts) == 8000
    # Each of 8000 letters is one of 10: mean 800, standard deviation about 27.
    assert all(abs(count - 800) < 5 * 27 for count in counts)
    assert draw_words(0, 10, min_letters=4, max_letters=4, alphabet="aeilnoprst") == words[:10]


def test_all_lengths_are_drawn_equally_often() -> None:
    words = draw_words(0, 1000, min_letters=4, max_letters=6, alphabet="aeilnoprst")
    counts = [sum(len(word) == length for word in words) for length in (4, 5, 6)]
    assert sum(counts) == 1000
    # Each of three lengths: mean 333, standard deviation about 15.
    assert all(abs(count - 333) < 5 * 15 for count in counts)


def test_impossible_alphabets_are_refused() -> None:
    for letters, alphabet in ((1, "abc"), (3, "a"), (3, "aba")):
        with pytest.raises(ValueError, match="words need 2 letters or more"):
            draw_words(0, 1, min_letters=letters, max_letters=letters, alphabet=alphabet)


def test_the_task_goes_through_the_tiny_tokenizer(tmp_path: Path) -> None:
    files = write_task(tmp_path, seed=0, num_train=3, num_val=2, num_sft=4, min_letters=5, max_letters=5)
    tokenizer = make_tiny_tokenizer()
    config = DataConfig(train_files=(str(files.train),), prompts_per_step=2)
    prompts = PromptDataset(read_rows([files.train]), tokenizer, config, "train")
    assert {len(prompts.prompt(row, "e0-000000").token_ids) for row in prompts.row_numbers} == {3 + 9 + 5}
    example = SftDataset(read_rows([files.sft]), tokenizer, SftDataConfig(max_tokens=64))[0]
    assert sum(example.loss_mask) == 5 + 1
