"""Guests from other libraries: what comes from verl or TRL finds its way here.

migration/    their settings into ours, every one of them accounted for
agent_loops/  verl's agent loops, played by an adapter
"""
