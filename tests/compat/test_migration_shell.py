from __future__ import annotations

import pytest

from strop.compat.migrate.shell import read_commands


def words(text: str, **variables: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in read_commands(text, variables)]


def last(text: str, **variables: str) -> list[str]:
    return words(text, **variables)[-1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run a b", ["run", "a", "b"]),
        ("run a \\\n    b \\\n    c", ["run", "a", "b", "c"]),
        ('run a,\\\nb "c"\\\nd', ["run", "a,b", "cd"]),
        ("run a # not this\n", ["run", "a"]),
        ("run a#b", ["run", "a#b"]),
        ("run 'a b' \"c d\" e\\ f", ["run", "a b", "c d", "e f"]),
        ('run key=\'["console","wandb"]\'', ["run", 'key=["console","wandb"]']),
        ("run a 2>&1 | tee log", ["tee", "log"]),
        ("run a > out.log 2>&1", ["run", "a"]),
        ("run a &> out.log", ["run", "a"]),
        ("X=1 run $X", ["run", "1"]),
        ("X=1; Y=$X$X\nrun ${Y}", ["run", "11"]),
        ("export X=1\nrun $X", ["run", "1"]),
        ("X='a b'\nrun $X \"$X\"", ["run", "a", "b", "a b"]),
        ("X='a b'\nrun k=$X", ["run", "k=a", "b"]),
        ("run ${X:-7}", ["run", "7"]),
        ("X=\nrun ${X:-7}${X-8}", ["run", "7"]),
        ("Y=2\nrun ${X:-a/$Y}", ["run", "a/2"]),
        ("X=3\nrun $((X * 2 + 1)) $(( ($X + 1) / 2 ))", ["run", "7", "2"]),
        ("A=(\n  a=1  # one\n  b='x y'\n)\nrun \"${A[@]}\" c", ["run", "a=1", "b=x y", "c"]),
        ('A=(a)\nA+=(b c)\nrun "${A[@]}"', ["run", "a", "b", "c"]),
        ("X=a\nX+=b\nrun $X", ["run", "ab"]),
        ("A=(a b)\nrun $A", ["run", "a"]),
        ("cat <<EOF\nrun wrong\nEOF\nrun right", ["run", "right"]),
        ("run '$X' \"\\$X\"", ["run", "$X", "$X"]),
        ("declare -a A=(x y)\nrun ${A[*]}", ["run", "x", "y"]),
    ],
)
def test_a_command_is_read_as_a_shell_reads_it(script: str, expected: list[str]) -> None:
    assert last(script) == expected


def test_commands_are_separated_as_in_a_shell() -> None:
    assert words("a 1 && b 2 || c 3; d 4\ne 5 | f 6") == [
        ["a", "1"], ["b", "2"], ["c", "3"], ["d", "4"], ["e", "5"], ["f", "6"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "text", "names"),
    [
        ("run k=$X", "k=$X", ("$X",)),
        ("run k=$(date)", "k=$(date)", ("$(date)",)),
        ("run k=`date +%s`", "k=`date +%s`", ("`date +%s`",)),
        ('X=$(date) ; run "k=$X"', "k=$(date)", ("$(date)",)),
        ("run k=$1", "k=$1", ("$1",)),
        ("run k=${X%.*}", "k=${X%.*}", ("${X%.*}",)),
        ("run k=$((X + 1))", "k=$((X + 1))", ("$((X + 1))",)),
        ("if [ -z $1 ]; then X=1; else X=2; fi\nrun k=$X", "k=$X", ("$X",)),
    ],
)
def test_what_only_a_shell_knows_stays_as_it_is_written(
    script: str, text: str, names: tuple[str, ...]
) -> None:
    word = read_commands(script)[-1].words[1]
    assert (word.text, word.unresolved) == (text, names)


def test_given_values_win_over_the_script_and_its_conditions() -> None:
    script = "X=1\nif true; then Y=2; fi\nrun $X $Y $Z"
    assert last(script, X="9", Y="8", Z="7") == ["run", "9", "8", "7"]


def test_an_unresolved_entry_leaves_the_others_of_its_array_alone() -> None:
    entries = read_commands('A=(a=$X b=1)\nrun "${A[@]}"')[-1].words[1:]
    assert [(entry.text, entry.unresolved) for entry in entries] == [("a=$X", ("$X",)), ("b=1", ())]


def test_words_know_their_lines() -> None:
    command = read_commands("\n# c\nrun a \\\n  b\n")[-1]
    assert [word.line for word in command.words] == [3, 3, 4]
    entries = read_commands('A=(\n a=1\n b=2\n)\nrun "${A[@]}"')[-1].words
    assert [word.line for word in entries] == [5, 2, 3]


@pytest.mark.parametrize(
    ("script", "line"),
    [("run 'a", 1), ('\nrun "a', 2), ("run $(a", 1), ("\n\nrun ${a", 3), ("\nA=(a\nrun", 2)],
)
def test_what_is_never_closed_is_an_error_with_its_line(script: str, line: int) -> None:
    with pytest.raises(ValueError, match=f"line {line}: .*never closed"):
        read_commands(script)


def test_quotes_in_comments_and_documents_open_nothing() -> None:
    assert last("A=(\n a=1 # it's one\n)\nrun \"${A[@]}\" # it's all") == ["run", "a=1"]
    assert words("cat <<EOF > x\nit's\nEOF\nrun b # '")[-1] == ["run", "b"]


def test_what_nobody_knows_is_one_word_and_names_the_variable_that_would_say_it() -> None:
    (word,) = read_commands("X=$(date +%m %d)\nrun a_$X")[-1].words[1:]
    assert (word.text, word.unresolved, word.variables) == ("a_$(date +%m %d)", ("$(date +%m %d)",), ("X",))
    assert last("run $(pwd)/`pwd`", PWD="/w") == ["run", "/w//w"]
