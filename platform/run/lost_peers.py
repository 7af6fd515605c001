"""Peers on other nodes that are gone without a word: cut off, or without power."""

from __future__ import annotations

import socket

LOSS_S = 5
"""A connection whose other end is silent for so long is given up."""


def notice_loss(sock: socket.socket, seconds: int = LOSS_S) -> None:
    """Have the kernel give a TCP connection up whose other end is silent for so long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, seconds // 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
