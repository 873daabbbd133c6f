"""Results of strop.train, strop.sft and strop.evaluate: how the call ended, its metrics, samples and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.observability.reward_curve import figure_of, run_series
from strop.observability.trackers.setup import METRICS_FILE, read_metrics
from strop.run import MODEL_FOLDER, RunFolder
from strop.utils.shell_words import shell_word

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a call that made a run."""

    run: Path | None
    """The run folder, which every command of strop reads; None for an evaluation, which leaves none."""
    steps: int = 0
    seconds: float = 0.0
    """Wall-clock time of the last process that trained, with the steps of those before it."""
    pass_rate_start: float | None = None
    """Validation before the first step; None without validation data, and where nothing decides which answers pass."""
    pass_rate_final: float | None = None
    interval: tuple[float, float] | None = None
    """95 % Wilson interval of the last validation's pass rate, with the answers to one prompt as a cluster."""
    reward_start: float | None = None
    """Mean reward of the validation before the first step."""
    reward_final: float | None = None
    """Mean reward of the last validation."""
    loss: float | None = None
    """With strop.sft: mean loss per trained token of the last step."""
    val_loss: float | None = None
    """The same on validation data."""
    answers: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """With strop.evaluate: each answer."""

    def samples(self, step: int | None = None, *, split: str = "train") -> pd.DataFrame:
        """Samples as a table, one row each: prompt, response, score, reward_parts, advantage, fate, ...

        Args:
            step: of the run; None: all of them.
            split: train or val.
        """
        import pandas as pd  # half a second

        if self.run is None:
            return pd.DataFrame(list(self.answers))
        with RunFolder.open(self.run, read_only=True) as run:
            return pd.DataFrame(run.samples.read(step, split=split))

    def metrics(self) -> pd.DataFrame:
        """One row per step with all its numbers; the index is the step."""
        import pandas as pd  # half a second

        records = read_metrics(self._folder() / METRICS_FILE)
        return pd.DataFrame(records).set_index("step") if records else pd.DataFrame()

    def model(self, **options: Any) -> Any:
        """The trained model, loaded by transformers.

        Args:
            options: of from_pretrained.
        """
        from transformers import AutoModelForCausalLM  # seconds

        return AutoModelForCausalLM.from_pretrained(self.model_path, **options)

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        from transformers import AutoTokenizer  # seconds

        return AutoTokenizer.from_pretrained(self.model_path)

    @property
    def model_path(self) -> Path:
        """Folder of the trained model, for strop.train(model=...) and every other program.

        Raises:
            FileNotFoundError: the run keeps none (run.hf_model=never).
        """
        link = self._folder() / MODEL_FOLDER
        if not link.is_dir():
            raise FileNotFoundError(
                f"{self.run} has no model folder (run.hf_model): write one with `strop export {shell_word(self.run)}`"
            )
        return link.resolve()

    def plot(self) -> Figure:
        """Rewards and pass rates over the steps, as a figure of matplotlib, which a notebook shows."""
        folder = self._folder()
        return figure_of(run_series(read_metrics(folder / METRICS_FILE)), title=folder.name)

    def _folder(self) -> Path:
        if self.run is None:
            raise ValueError("an evaluation leaves no run: it has samples(), pass_rate_final and interval")
        return self.run
