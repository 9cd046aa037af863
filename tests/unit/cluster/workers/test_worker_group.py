"""What a place does by itself; the rest of it is tested on real nodes."""

from __future__ import annotations

import socket
import threading
import time

from cluster.workers.worker_group import wait_until_unreachable


def test_a_place_gives_up_once_nobody_has_been_in_reach_for_long_enough() -> None:
    server = socket.create_server(("127.0.0.1", 0), backlog=100)
    address = "{}:{}".format(*server.getsockname())
    waiting = threading.Thread(target=wait_until_unreachable, args=(address, 0.5, 0.02), daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    began = time.monotonic()
    server.close()
    waiting.join(20.0)
    assert not waiting.is_alive()
    assert time.monotonic() - began > 0.4
