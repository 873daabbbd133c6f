"""Profile of a run: where its time went, for `strop profile` and the viewer.

phases.py     Seconds of each phase of a run, from its event log
steps.py      Profiled steps: work and waits of each rank, from their timelines
avoidable.py  Parts of the time that a setting would save
report.py     All of it for one run
"""
