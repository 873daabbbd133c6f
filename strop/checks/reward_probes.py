"""Answers that a reward is tried with: right ones in the usual forms, junk, answers of other rows, and exploits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from strop.trajectory import Prompt

ProbeKind = Literal["right", "junk", "other", "exploit", "huge"]
FORMS = {
    "bare": "{}",
    "####": "Let me work it out.\n#### {}",
    "boxed": "So the answer is $\\boxed{{{}}}$.",
    "tag": "<think>Let me see.</think><answer>{}</answer>",
    "Answer:": "Let me work it out.\nAnswer: {}",
    "sentence": "The answer is {}.",
}
"""How a right answer may be written; the truth goes into the braces."""
JUNK = {
    "empty": "",
    "white space": " \n\t ",
    "noise": "xq zv !! ?? ~~",
    "a refusal": "I do not know.",
}
HUGE_CHARS = 200_000
_REPEATS = 200


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One answer to one row."""

    row: int
    kind: ProbeKind
    name: str
    """What it tries; of the right ones, the form."""
    text: str


def truth_of(prompt: Prompt) -> str | None:
    """The right answer as text; None where the ground truth is none that an answer could repeat."""
    truth = prompt.ground_truth
    if isinstance(truth, (list, tuple)) and truth:
        truth = truth[0]
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        return None
    return str(truth) or None


def first_probes(prompts: Sequence[Prompt]) -> list[Probe]:
    """What needs no knowledge of the form that the reward reads: right answers, junk, huge ones."""
    made: list[Probe] = []
    for row, prompt in enumerate(prompts):
        truth = truth_of(prompt)
        if truth is not None:
            made += [
                Probe(row=row, kind="right", name=name, text=form.format(truth))
                for name, form in FORMS.items()
            ]
            if "####" in truth:  # a whole solution, as in GSM8K's own files
                made.append(
                    Probe(row=row, kind="right", name="end of it", text=truth.rpartition("####")[2].strip())
                )
        made += [Probe(row=row, kind="junk", name=name, text=text) for name, text in JUNK.items()]
        question = "\n".join(str(message.get("content", "")) for message in prompt.messages)
        if question.strip():
            made.append(Probe(row=row, kind="exploit", name="the prompt echoed", text=question))
    for name, unit in {"letters": "a", "digits": "7", "brackets": "\\boxed{("}.items():
        text = (unit * (HUGE_CHARS // len(unit)))[:HUGE_CHARS]
        made.append(Probe(row=0, kind="huge", name=f"{HUGE_CHARS} characters of {name}", text=text))
    return made


def second_probes(prompts: Sequence[Prompt], forms: Sequence[str | None]) -> list[Probe]:
    """What uses the form that scored highest for each row; rows of which none did are left out.

    Args:
        prompts: rows.
        forms: name in FORMS for each of them, or None.
    """
    truths = [truth_of(prompt) for prompt in prompts]
    made: list[Probe] = []
    for row, name in enumerate(forms):
        truth, form = truths[row], FORMS.get(name or "")
        if truth is None or form is None:
            continue
        others = [one for one in dict.fromkeys(truths) if one is not None and not _alike(one, truth)]
        if not others:
            continue
        start = row % len(others)
        wrong, wrong_too = others[start], others[(start + 1) % len(others)]
        right, bad, bad_too = form.format(truth), form.format(wrong), form.format(wrong_too)
        exploits = {
            "several answers, the right one first": f"{right}\n{bad}\n{bad_too}",
            "several answers, the right one last": f"{bad}\n{bad_too}\n{right}",
            "the right answer hidden in a comment": f"<!-- {right} -->\n{bad}",
            "a wrong answer repeated": "\n".join([bad] * _REPEATS),
            "the right answer repeated": "\n".join([right] * _REPEATS),
        }
        made.append(Probe(row=row, kind="other", name=f"the answer of another row ({wrong})", text=bad))
        made += [Probe(row=row, kind="exploit", name=name, text=text) for name, text in exploits.items()]
    return made


def _alike(one: str, other: str) -> bool:
    """Answers that a lenient reward may take for each other."""
    left, right = one.strip().lower(), other.strip().lower()
    return left in right or right in left
