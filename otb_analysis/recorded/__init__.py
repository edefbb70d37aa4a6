"""Somebody else's rollouts: recorded ones, read as a stream, become a run in our store.

rows of files ─▶ one record each (`formats`) ─▶ whole groups by step ─▶ with a model: `Rollouts`, measured
                                                                  └──▶ without: what was recorded
What does not fit is refused with the record's number; nothing is repaired silently.
"""
