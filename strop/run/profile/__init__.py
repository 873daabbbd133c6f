"""Profiled steps in the run folder: `profile/step-000003/`, with the timeline of the step and the traces of processes.

parts.py         Spans of each process, joined into the timeline of the step
chrome_trace.py  The timeline as a Chrome trace, which Perfetto opens
waits.py         Waits of workers: the gaps between their calls
"""
