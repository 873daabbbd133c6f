"""The built-in scorers, one module each, chosen by the `data_source` of a row.

gsm8k.py          `#### 72` at the end of a worked solution
math_boxed.py     the last `\\boxed{...}`, compared by math-verify
math_dapo.py      a line `Answer: ...`; +1 or -1
countdown.py      an expression in <answer> tags that reaches a target from given numbers
exact.py          the whole answer, stripped, equals the ground truth
reasoning_gym.py  the task's own score_answer of the reasoning-gym package; reasoning_gym_rows.py: its entries as rows
choice.py         the letter of a multiple-choice question
search_qa.py      <answer> tags, by exact match or F1
geometry.py       the last `\\boxed{...}` of a question with a picture
code.py           programs with hidden tests, run in the sandbox with code_harness.py
budget.py         compute budget of a comparison
tags.py           <answer> tags found in one pass
dispatch.py       the built-in scorer of each data source; loading.py: the scorers as a reward function
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.rewards.scorers.dispatch import default_compute_score, known_data_sources, prepare

__all__ = [
    "default_compute_score",
    "known_data_sources",
    "prepare",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".dispatch": "default_compute_score known_data_sources prepare",
    },
)
