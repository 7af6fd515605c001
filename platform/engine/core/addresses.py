"""Where clients reach an engine's process, and what the two say to each other beside vLLM.

A client has a DEALER to each of the engine's two ROUTERs, both with its identity. It says
``HELLO`` on the output socket, and again every second. The engine answers the first with ``READY``
and each later one with ``BEAT``. Once it is ready the client sends vLLM's frames to the input
socket, and vLLM's outputs come on the output socket.

* ``[HELLO]`` or ``[HELLO, connection]``. ``connection`` is any bytes that a client makes anew
  for each pair of sockets, so that the engine knows one who has come back from one who stayed.
* ``[READY, response]``: vLLM's ``EngineCoreReadyResponse`` in msgpack. One that comes again says
  that the engine had let the client go, and has nothing any more of what it had asked for.
* ``[BEAT, state]``: ``[steps, running, waiting, cpu_s]`` in msgpack. ``steps`` counts those of the
  engine since its start, ``cpu_s`` its process's seconds on all cores; it may be left out.
* ``[load, *outputs]`` or ``[load]``: vLLM's frames of outputs, and the engine's load
  (:mod:`loomserve.platform.state.load_report`), which comes alone where there are no outputs.
* ``[DEAD]``: the engine ends. vLLM's own word.

What a client sends before ``READY`` is not looked at.
"""

from __future__ import annotations

HELLO = b"HELLO"
READY = b"READY"
BEAT = b"BEAT"
DEAD = b"ENGINE_CORE_DEAD"

HELLO_PERIOD_S = 1.0
"""How often a client says that it is there."""
