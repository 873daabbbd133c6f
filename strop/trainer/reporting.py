"""The numbers and sentences of a step."""

from __future__ import annotations

from collections.abc import Sequence

from strop.algorithms.batch_metrics import spread
from strop.base.metrics import Metric
from strop.trainer.config import Config
from strop.workers import metrics as measure
from strop.workers.reports import EpisodeReport

FAILED = Metric("rollout/failed", "samples", "whose agent failed")


def episode_metrics(reports: Sequence[EpisodeReport], config: Config) -> dict[str, float]:
    """Lengths, turns and outcomes of the episodes."""
    finished = [report for report in reports if report.is_finished]
    outcomes = [(report.data_source, report.outcome) for report in reports if report.outcome is not None]
    return {
        **measure.length_metrics(
            prompt_lengths=[report.num_prompt_tokens for report in finished],
            response_lengths=[report.num_response_tokens for report in finished],
            is_aborted=[report.stop_reason == "aborted" for report in finished],
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.data.max_response_tokens,
        ),
        **spread(measure.TURNS, [report.num_turns for report in finished]),
        **measure.agent_loop_metrics(
            [_seconds(report) for report in finished],
            [(report.num_prompt_tokens, report.num_response_tokens) for report in finished],
        ),
        **measure.agent_number_metrics([report.numbers for report in finished]),
        **measure.reward_outcome_metrics([outcome.kind for _, outcome in outcomes]),
        **measure.reward_part_metrics(
            [source for source, outcome in outcomes if outcome.score is not None],
            [outcome.parts for _, outcome in outcomes if outcome.score is not None],
        ),
        **measure.reward_usage_metrics([outcome.usage for _, outcome in outcomes]),
        FAILED: float(len(reports) - len(finished)),
    }


def _seconds(report: EpisodeReport) -> dict[str, float]:
    """Time of one sample per activity, under verl's names."""
    return {
        "generate_sequences": report.timings.get("generate_s", 0.0),
        "tool_calls": report.timings.get("tool_calls", 0.0),
        "compute_score": 0.0 if report.outcome is None else report.outcome.seconds,
    }
