"""Deterministic simulation: whole runs in one process under a virtual clock; a seed decides what goes wrong, and replays it.

    loop.py         virtual time; an event loop for each process
    world.py        processes and what lies between them; events
    network.py      twins of channel sockets and HTTP          names.py   of name resolve        disk.py   of the disk
    processes.py    what stands where computing would be: an agent, an engine, a model worker
    seams.py        where all of these take the place of the real ones
    scenario.py     what a seed decides                          faults.py, supervisor.py   who strikes, who starts again
    invariants.py   what must hold after every event             bugs.py    known bugs, to see that they are found
    run.py          one simulated run                            campaign.py   many, and the smallest that fails

`python -m tests.simulation`.

Real are MasterWorker, GserverManager with all its parts, RolloutWorker, heads (TrajectoryReceiver, DataStore),
GenerationServer with its HTTP handlers, both streams with their channel protocol, launch/program.py's plan,
launch/supervisor/policy.py.
"""
