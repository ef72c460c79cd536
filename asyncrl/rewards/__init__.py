"""From a prompt's responses to a judged group: shared by rollout workers and (mode=sync) model workers.

import_object.py  users' functions and classes by import path
reward.py         users' reward functions: limits, threads, what is no number
outcome.py        why a group is not to be trained
trajectory.py     responses -> the SequenceSample of a group
"""
