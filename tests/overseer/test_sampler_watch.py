from __future__ import annotations

from rllib_llm.overseer import oversight as module
from rllib_llm.overseer.oversight import SamplerWatch


def test_a_decode_loop_calls_nobody_where_nobody_listens():
    assert SamplerWatch().on_step is None


def test_who_asks_is_told_of_the_next_request_once_a_second(monkeypatch):
    now, said, watch = [100.0], [], SamplerWatch()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    watch.tell(said.append)
    watch.begin(0, 4)
    watch.generating(version=0, max_tokens=6)
    for _ in range(5):
        watch.on_step()
        now[0] += 0.5
    assert said == [f"generating token {i} of 6" for i in (1, 3, 5)]
    watch.end()
    assert watch.on_step is None  # how long it takes is known now
