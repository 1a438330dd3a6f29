"""A group whose ranks are on several nodes: the first, which has the front, and the others, which are headless.

    first node                                        headless node
    Assembly listens at --dist-init-addr   ◀─ Hello ─  dials, again and again
    every node is here, sockets are bound  ─ Orders ─▶  starts its ranks, which connect to the first node's front
    Guest: how its processes are           ◀─ Alive ─▶  a word a second, each way
                                           ◀ RankEnded
    connection ends                        ──────────▶  ends its ranks, dials for the next life

One connection is one life of the group.
"""
