"""Deterministic simulation: whole runs in one process under a virtual clock. A seed determines the faults, and reproduces them.

    loop.py         virtual time; an event loop for each process
    world.py        processes, the environment between them, events
    network.py      test doubles of channel sockets and HTTP
    names.py        test double of name resolve
    disk.py         test double of the disk
    processes.py    stand-ins for computation: an agent, an engine, a model worker
    seams.py        replaces the real parts by these
    scenario.py     the shape of a run and its faults, drawn from a seed
    faults.py       injects the faults
    supervisor.py   test double of the launcher: restarts processes
    invariants.py   invariants that are checked after every event
    bugs.py         known bugs, to test that the simulation finds them
    run.py          one simulated run
    campaign.py     many runs, and the smallest failing scenario

Run it with `python -m tests.simulation`.

The real classes are MasterWorker, GserverManager with all its parts, RolloutWorker, heads (TrajectoryReceiver, DataStore),
GenerationServer with its HTTP handlers, both streams with their channel protocol, the plan of launch/program.py, and
launch/supervisor/policy.py.
"""
