"""Every settings key that a sentence in strop/ names is one of the settings, and of the command whose user reads it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from strop.cli.commands.eval import READS as OF_EVAL
from strop.cli.commands.generate import READS as OF_GENERATE
from strop.cli.commands.prefer import READS as OF_PREFER
from strop.cli.commands.score import READS as OF_SCORE
from strop.cli.commands.serve import READS as OF_SERVE
from strop.cli.commands.sft import READS as OF_SFT
from strop.cli.unused_keys import OF_TRAINING, Reads
from strop.config.schema import locate, tree
from strop.trainer.config import Config

PACKAGE = Path(__file__).parent.parent / "strop"
KEYS = tree(Config)
SECTIONS = {key.rpartition(".")[2] for key, found in KEYS.items() if found.is_section}
NAMES = {key.rpartition(".")[2] for key in KEYS}
GAP = "\N{OBJECT REPLACEMENT CHARACTER}"
"""What an f-string puts in."""

OTHERS = {"compat/": "keys of verl, TRL and OpenRLHF"}
FILES = re.compile(r"\.(py|json|jsonl|yaml|parquet|safetensors|log|toml|index)$")
NO_KEYS = {
    "reward_model.ground_truth": "a column of rows",
    "reward.policies": "the former name of a key",
    "rollout.overlap_log_probs": "a removed key",
    **dict.fromkeys(("trainer.clock", "trainer.clock_lengths", "trainer.clock_latencies"), "removed keys"),
    "model.save_pretrained": "a method of transformers",
    "model.vision_tower": "a part of a model", "model.multi_modal_projector": "a part of a model",
    "vllm.__version__": "of a package",
    "data.tr": "the beginning of a word, for completion",
    "data.max_": "the beginning of two keys",
    **dict.fromkeys(("optim.warmup_steps", "optim.warmup_share"), "build_config puts the place of the section in"),
    **dict.fromkeys(
        ("limits.wall_s", "limits.cpu_s", "limits.memory_mib", "limits.output_kib", "limits.disk_mib"),
        "of a sandbox, also of one that a program made itself",
    ),
}  # fmt: skip
OF_ANOTHER_COMMAND = {
    ("cli/commands/reward_model.py", "reward_model.path"): "what `strop train` is given then",
    ("cli/commands/prefer.py", "reward_model.path"): "what `strop train` is given then",
    ("cli/commands/score.py", "run.save_samples"): "of the run whose samples are scored",
    ("data/sft/rows.py", "run.save_samples"): "of the run whose samples are imitated",
    ("cli/commands/eval.py", "model.path"): "with --config, which names the model then",
    ("data/readers.py", "data.streaming"): "rows of `strop train` alone",
    ("data/chat.py", "data.continue_final_message"): "prompts of `strop train` and of answers alone",
    ("engines/memory.py", "actor.engine.max_tokens_per_device"): "said at the start of `strop train` alone",
    ("engines/training.py", "resources.offload_idle"): "it is set",
}
READERS: dict[str, tuple[Reads, ...]] = {
    "trainer/sft/": (OF_SFT,),
    "trainer/preference/": (OF_PREFER,),
    "engines/": (OF_TRAINING, OF_SFT, OF_PREFER),
    "data/chat.py": (OF_TRAINING, OF_SFT, OF_PREFER),
    "data/media.py": (OF_TRAINING, OF_SFT),
    "data/readers.py": (OF_TRAINING, OF_SFT, OF_PREFER),
    "utils/chat_template/": (OF_TRAINING, OF_SFT, OF_PREFER),
    "cli/commands/eval.py": (OF_EVAL,),
    "cli/commands/generate.py": (OF_GENERATE,),
    "cli/commands/score.py": (OF_SCORE,),
    "cli/commands/serve.py": (OF_SERVE,),
    "agents/openai_server/server.py": (OF_SERVE,),
}
"""Files and folders of a command, or of several that share them: a key that they name is read by each, or another one
beside it is."""


@dataclass(frozen=True)
class Sentence:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _texts(tree_of_file: ast.Module) -> Iterator[tuple[int, str]]:
    """Every text but docstrings, and those of f-strings whole."""
    passed: set[int] = set()
    for node in ast.walk(tree_of_file):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            passed.update(id(statement.value) for statement in body if isinstance(statement, ast.Expr))
        if isinstance(node, ast.JoinedStr):
            passed.update(map(id, node.values))
    for node in ast.walk(tree_of_file):
        if id(node) in passed:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@functools.cache
def sentences() -> list[Sentence]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith(tuple(OTHERS)):
            found += [Sentence(file, *text) for text in _texts(ast.parse(path.read_text(encoding="utf-8")))]
    return found


def named_keys(text: str) -> list[str]:
    """What looks like a full key: a name of a section, and names below it."""
    pattern = rf"(?<![\w./{{}}@-])(?:{'|'.join(sorted(SECTIONS))})(?:\.[a-zA-Z_]\w*)+(?:\.(?={GAP}))?"
    return [key for key in re.findall(pattern, text) if not FILES.search(key)]


def exists(key: str) -> bool:
    """A key, an entry of a free dict, or the beginning of keys before a gap."""
    if key.endswith("."):
        return any(known.startswith(key) for known in KEYS) or (key[:-1] in KEYS and KEYS[key[:-1]].is_free)
    try:
        locate(Config, key)
    except ValueError:
        return False
    return True


def test_keys_are_found_in_sentences() -> None:
    assert len(sentences()) > 5000
    assert named_keys("set optim.lr, actor.optim.lr or (run.keep), not ./run.yaml") == [
        "optim.lr", "actor.optim.lr", "run.keep",
    ]  # fmt: skip
    assert named_keys(f"check sft.data.{GAP}_files") == ["sft.data."]
    known = ("sft.data.messages_key", "reward.kwargs.strict", "sft.data.")
    assert [exists(key) for key in (*known, "data.messages_key", "sft.datta.")] == [True] * 3 + [False] * 2


def test_every_key_that_a_sentence_names_exists() -> None:
    wrong = [
        f"{sentence}: {key}"
        for sentence in sentences()
        for key in named_keys(sentence.text)
        if (" " in sentence.text or key.partition(".")[0] in KEYS)
        and key not in NO_KEYS and not exists(key) and not _is_of_a_role(key, sentence.text)
    ]  # fmt: skip
    assert wrong == []


def _is_of_a_role(key: str, text: str) -> bool:
    """`optim.name of this role`: where the code does not know whose, the sentence says that it is a role's."""
    return exists(f"actor.{key}") and key.startswith(("engine.", "optim.")) and "role" in text


def test_every_setting_that_a_sentence_gives_is_given_by_its_full_key() -> None:
    # Text before is a sentence; an argument of Python, such as tokenizer=..., and HTML are none of a command line.
    python = {"tokenizer", "attn_implementation", "type"}
    wrong = [
        f"{sentence}: {name}="
        for sentence in sentences()
        for name in re.findall(rf"(?<![\w.={GAP}/\[{{-])([a-z_]{{3,}})=(?=[\w\[{{'\".-]|{GAP})", sentence.text)
        if " " in sentence.text and name in NAMES - set(KEYS) - python
        and not sentence.file.startswith(("compat/", "controller/verl_groups.py", "data/dataset_class.py"))
    ]  # fmt: skip
    assert wrong == []


def _unread(sentence: Sentence) -> list[str]:
    """Keys that a command does not read, whose user sees the sentence."""
    readers = [reads for part, of in READERS.items() if sentence.file.startswith(part) for reads in of]
    keys = [
        key for key in named_keys(sentence.text) if exists(key) and not (key in KEYS and KEYS[key].is_section)
    ]
    return [
        key
        for reads in readers
        for key in keys
        if (sentence.file, key) not in OF_ANOTHER_COMMAND
        and not reads.covers(key)
        and (len(readers) == 1 or not any(map(reads.covers, keys)))
    ]


def test_a_command_does_not_send_its_user_to_a_setting_of_another() -> None:
    wrong = [
        f"{sentence}: {key}" for sentence in sentences() if " " in sentence.text for key in _unread(sentence)
    ]
    assert wrong == []


@pytest.mark.parametrize("part", READERS)
def test_the_parts_of_a_command_are_there(part: str) -> None:
    assert (PACKAGE / part).exists()
