"""From a prompt's responses to a judged group: what those who make groups share, rollout workers and (mode=sync) model workers.

loading.py     users' functions and classes by import path
reward.py      users' reward functions: limits, threads, what is no number
outcome.py     why a group is not to be trained
trajectory.py  responses -> the SequenceSample of a group
"""
