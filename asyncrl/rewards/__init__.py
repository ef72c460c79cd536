"""From a prompt's responses to a judged group: shared by rollout workers and (mode=sync) model workers.

import_object.py  users' functions and classes by import path
reward.py         calls users' reward functions: time limits, judge processes or threads, checks of the returned numbers
outcome.py        reasons for not training on a group
trajectory.py     responses -> the SequenceSample of a group
"""
