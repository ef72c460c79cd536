"""From a prompt's responses to a judged group: shared by rollout workers and (mode=sync) model workers.

reward_function.py  imports a user's reward function, and checks its signature and the numbers that it returns
reward.py           calls the reward function for a group, in judge processes or threads, with time limits
judges.py           the worker's side of the judge processes; judge_main.py is the program that runs in them
outcome.py          how a rollout ends without a group to train on, and the reasons
trajectory.py       responses -> the SequenceSample of a group
sandbox/            runs untrusted programs in isolation, for reward functions that need it
"""
