"""The process of a further rank: loads its shard, then executes rank 0's plans until rank 0 ends.

Started by `Followers` with the descriptor of a socket: to rank 0, or where that is on another host, to the
process that keeps this host's ranks. It takes no signals of a console and no SIGTERM: it ends when rank 0
says so or its connection ends, at the latest when its parent has ended. What a killed parent leaves in
shared memory it removes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from baton.worker.ranks.channel import Channel, ChannelClosed, CollectiveError
from baton.worker.ranks.followers import EXIT_FAILED, EXIT_LOST, IMPORT_SECONDS, SEND_SECONDS
from baton.worker.ranks.messages import Failed, Setup
from baton.worker.ranks.rendezvous import JoinError

PARENT_SECONDS = 0.1
"""How often it is checked whether rank 0 is still there."""
LOST_SECONDS = 1.0
"""From the end of a connection to that of the rank at its other end."""
PARENT_LOST_SECONDS = 10.0
"""How long a follower waits for its parent's end: if it was killed, a driver may first release a GPU's
memory."""


def main(descriptor: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor), SEND_SECONDS)
    setup = channel.receive(IMPORT_SECONDS)
    assert isinstance(setup, Setup)
    left: list[Callable[[], object]] = []
    watched = (setup.parent, left)
    threading.Thread(target=_end_with, args=watched, name="watch of rank 0", daemon=True).start()
    # Imported late: rank 0 may end while torch is loading.
    from baton.rpc import logs
    from baton.transport.shm import reap_orphans

    left.append(reap_orphans)  # rank 0 makes nothing before all have loaded their libraries
    logs.configure(f"rank{setup.shard.rank}", setup.config.log_level, setup.config.log_format)
    log = logs.get_logger()
    parent: Channel | None = None
    pages: Channel | None = None
    if setup.rendezvous is None:
        from baton.worker.ranks.hosts import join_master

        parent = channel
        try:
            channel, pages, setup = join_master(setup)
        except JoinError as error:
            log.error("this rank cannot join the others", why=str(error))
            return EXIT_FAILED
    from baton.worker.ranks.follower import Follower

    follower: Follower | None = None
    try:
        follower = Follower(setup, channel, parent, pages)
        follower.run()  # until rank 0 ends, as it was asked
    except (ChannelClosed, CollectiveError) as error:
        log.warning("another rank is lost", error=str(error))
        # If it is rank 0, and has started this process, the other thread ends it.
        ending = parent is None and isinstance(error, ChannelClosed)
        time.sleep(PARENT_LOST_SECONDS if ending else LOST_SECONDS)
        return EXIT_LOST
    except Exception as error:
        log.error("this rank has failed", exc_info=error)
        _tell(channel, error)
        return EXIT_FAILED
    finally:
        if follower is not None:
            follower.close()
    return 0


def _tell(channel: Channel, error: Exception) -> None:
    with contextlib.suppress(ChannelClosed):
        channel.send(Failed(str(error)))


def _end_with(parent: int, left: Sequence[Callable[[], object]]) -> None:
    """Ends this process with its parent, also one that hangs in a collective. `left`: what removes what
    rank 0 has left."""
    try:
        wait_for_end(parent)
        for remove in left:
            remove()
    finally:
        os._exit(EXIT_LOST)


def wait_for_end(parent: int) -> None:
    """Until the last thread of this process's parent has ended, whose files are closed then. They may not be
    when the parent has become another: threads that have ended do not wait for one whose driver still
    releases a GPU's memory. From then on it waits `PARENT_LOST_SECONDS` at most."""
    try:
        ended = [os.pidfd_open(parent)]
    except ProcessLookupError:
        return
    except OSError:
        ended = []  # gVisor has none
    while os.getppid() == parent:
        if select.select(ended, [], [], PARENT_SECONDS)[0]:
            return
    select.select(ended, [], [], PARENT_LOST_SECONDS if ended else 0)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads of the process group
