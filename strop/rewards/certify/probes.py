"""Probe answers for a reward: right ones in the usual forms, junk, answers of other rows, and exploits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strop.protocol.trajectory import Prompt

ProbeKind = Literal["right", "junk", "other", "exploit", "huge"]
FORMS = {
    "bare": "{}",
    "####": "Let me work it out.\n#### {}",
    "boxed": "So the answer is $\\boxed{{{}}}$.",
    "tag": "<think>Let me see.</think><answer>{}</answer>",
    "Answer:": "Let me work it out.\nAnswer: {}",
    "sentence": "The answer is {}.",
}
"""Usual forms of a right answer; the truth goes into the braces."""
JUNK = {
    "empty": "",
    "white space": " \n\t ",
    "noise": "xq zv !! ?? ~~",
    "a refusal": "I do not know.",
}
MAX_VALUES = 8
"""Values of a nested ground truth that are tried as answers."""
HUGE_CHARS = 200_000
_REPEATS = 200


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One answer to one row."""

    row: int
    kind: ProbeKind
    name: str
    """Name of the attempt; of the right ones, the form."""
    text: str
    form: str = ""
    """Of right ones: the name in FORMS; empty for another."""
    truth: str = ""
    """Of right ones: the text in the form."""
    place: str = ""
    """Of right ones: the key of the value in a nested ground truth."""


def truths_of(prompt: Prompt) -> dict[str, str]:
    """Texts of the ground truth that an answer could repeat, by their key in it: one text under the empty name; of a
    nested one the first values inside, and all of it as JSON. Empty where there is nothing of the kind."""
    truth = prompt.ground_truth
    if not isinstance(truth, (list, tuple, Mapping)):
        text = _text(truth)
        return {"": text} if text else {}
    texts = {key: text for key, value in _leaves(truth, "ground_truth") if (text := _text(value))}
    if not texts:
        return {}
    truths = dict(list(texts.items())[:MAX_VALUES])
    if len(texts) > 1:
        truths["ground_truth, joined by commas"] = ", ".join(texts.values())
    return truths | {"ground_truth as JSON": json.dumps(truth, ensure_ascii=False, default=str)}


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return str(value)


def _leaves(value: object, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]")
    else:
        yield key, value


def first_probes(prompts: Sequence[Prompt]) -> list[Probe]:
    """Probes that need no knowledge of the form that the reward reads: right answers, junk, huge ones."""
    probes: list[Probe] = []
    for row, prompt in enumerate(prompts):
        for key, truth in truths_of(prompt).items():
            probes += [
                Probe(
                    row=row,
                    kind="right",
                    name=name,
                    text=form.format(truth),
                    form=name,
                    truth=truth,
                    place=key,
                )
                for name, form in FORMS.items()
            ]
            if "####" in truth:  # a whole solution, as in GSM8K's own files
                end = truth.rpartition("####")[2].strip()
                probes.append(
                    Probe(row=row, kind="right", name="end of it", text=end, truth=truth, place=key)
                )
        probes += [Probe(row=row, kind="junk", name=name, text=text) for name, text in JUNK.items()]
        question = "\n".join(str(message.get("content", "")) for message in prompt.messages)
        if question.strip():
            probes.append(Probe(row=row, kind="exploit", name="the prompt echoed", text=question))
    for name, unit in {"letters": "a", "digits": "7", "brackets": "\\boxed{("}.items():
        text = (unit * (HUGE_CHARS // len(unit)))[:HUGE_CHARS]
        probes.append(Probe(row=0, kind="huge", name=f"{HUGE_CHARS} characters of {name}", text=text))
    return probes


def second_probes(prompts: Sequence[Prompt], best: Sequence[Probe | None]) -> list[Probe]:
    """Probes built from the right answer that scored highest for each row; rows of which none did are left out.

    Args:
        prompts: rows.
        best: that answer of each of them, or None.
    """
    truths = [
        next(iter(truths_of(prompt).values()), None) if right is None else right.truth
        for prompt, right in zip(prompts, best, strict=True)
    ]
    probes: list[Probe] = []
    for row, probe in enumerate(best):
        truth, form = truths[row], None if probe is None else FORMS.get(probe.form)
        if truth is None or form is None:
            continue
        others = [other for other in dict.fromkeys(truths) if other is not None and not _alike(other, truth)]
        if not others:
            continue
        start = row % len(others)
        wrong, other_wrong = others[start], others[(start + 1) % len(others)]
        right, bad, bad_too = form.format(truth), form.format(wrong), form.format(other_wrong)
        exploits = {
            "several answers, the right one first": f"{right}\n{bad}\n{bad_too}",
            "several answers, the right one last": f"{bad}\n{bad_too}\n{right}",
            "the right answer hidden in a comment": f"<!-- {right} -->\n{bad}",
            "a wrong answer repeated": "\n".join([bad] * _REPEATS),
            "the right answer repeated": "\n".join([right] * _REPEATS),
        }
        probes.append(Probe(row=row, kind="other", name=f"the answer of another row ({wrong})", text=bad))
        probes += [Probe(row=row, kind="exploit", name=name, text=text) for name, text in exploits.items()]
    return probes


def _alike(answer: str, other: str) -> bool:
    """Answers that a lenient reward may take for each other."""
    left, right = answer.strip().lower(), other.strip().lower()
    return left in right or right in left
