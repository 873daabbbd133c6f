"""Observability of a run: trackers, health rules, the viewer.

reward_curve.py  The curve of a run, as text for the terminal and as a PNG
profile/         Profile of a run
health/          Rules that turn the metrics of a run into named diagnoses with advice, during and after it
trackers/        Trackers
viewer/          Views of a recorded run: summaries, samples, plots, diffs, a web page
"""
