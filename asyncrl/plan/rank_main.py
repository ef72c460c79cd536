"""`python -m asyncrl.plan.rank_main`: plans one rank of one model. Reads a ShardTask on stdin and writes a ShardPlan to stdout, in
JSON."""

from __future__ import annotations

import os
import sys

import msgspec


def main() -> None:
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    from asyncrl.plan.ranks import ShardTask
    from asyncrl.plan.shard import plan_shard

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=ShardTask)
    with result:
        result.write(msgspec.json.encode(plan_shard(task)))


if __name__ == "__main__":
    main()
