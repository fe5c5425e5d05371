"""Messages arrive whole, in their order, however their bytes do."""

from __future__ import annotations

import socket
import threading

import pytest

from rllib_llm.serving.channel import Channel, Messages

SENT = [[], "a", list(range(3000)), None, b"x" * 2**21]


def test_messages_are_whole_however_their_bytes_come():
    ours, theirs = socket.socketpair()
    sender = Channel(ours)
    for each in SENT[:4]:
        sender.send(each)
    sender.close()
    with theirs:
        data = b"".join(iter(lambda: theirs.recv(2**20), b""))
    for step in (1, 7, 5000, len(data)):
        messages = Messages()
        parts = [data[at : at + step] for at in range(0, len(data), step)]
        assert [each for part in parts for each in messages.take(part)] == SENT[:4]


def test_an_end_takes_what_has_come_and_notices_that_the_other_is_gone():
    sender, receiver = map(Channel, socket.socketpair())
    with pytest.raises(BlockingIOError):
        receiver.arrived(waits=False)
    sender.send("first")
    assert receiver.receive() == "first"
    found = []
    # The last message is larger than the socket's buffer: somebody has to read while it is sent.
    thread = threading.Thread(target=lambda: [sender.send(each) for each in SENT])
    thread.start()
    while len(found) < len(SENT):
        found += receiver.arrived(waits=True)
    thread.join()
    assert found == SENT
    sender.close()
    assert sender.is_closed
    with pytest.raises(EOFError):
        receiver.arrived(waits=False)
    with pytest.raises(OSError, match="Broken pipe"):
        receiver.send("anybody?")
    receiver.close()
