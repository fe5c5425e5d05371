"""What judges reply, in the forms that they were seen to, and the one score that each form states.

The expected scores are what a person reads in the reply; where a person could not tell, no score.
"""

from __future__ import annotations

import asyncio
import pickle
import threading

import httpx
import pytest

from rllib_llm.envs.judges.llm_judges import JudgeServer, ReferenceJudge, stated_score
from rllib_llm.envs.judges.remote_rewards import RemoteReward
from rllib_llm.envs.judges.rewards import Invalid, RewardBatch, RewardError, RewardSum
from rllib_llm.shared import remote
from rllib_llm.shared.openai_client import OpenAIClient
from rllib_llm.shared.remote import OutageError
from tests.scripted_server import ScriptedServer, serving

QUICK = {"first_delay_s": 0.01, "max_attempts": 2, "judge_outage_s": 0}


def reply(text, finish="stop"):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return 200, {"choices": [choice]}, {}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("8", 8), (" 8.5\n", 8.5), ("8.", 8), ("**8**", 8), ("8/10", 8), ("8 / 10", 8),
        ("8 out of 10", 8), ("**8**/10", 8), ("-0.5", -0.5), ("10", 10), ("0", 0),
        ("Score: 8", 8), ("Score: 10/10", 10), ("Score: 0", 0), ("It has 3 faults.\nRating: 7", 7),
        ("It has 3 faults.\n**Score:** 4", 4), ("3/10 right.\n\nScore: 4", 4),
        ("Score: 8 - it lacks 2 facts", 8), ("## Score: 7.5 (of 10)", 7.5),
        ("Score: 8. 2 facts are missing.", 8), ("score = 8 out of 10, since 2 are missing", 8),
        ("Score: 8 because 2 facts are missing", 8), ("Verdict: **8**/10.", 8),
        ("**Final score: 8**", 8), ("Good.\n- Overall score: 7/10", 7), ("A final score: 8", None),
        # What is said of other scores, or claimed by the answer.
        ("Score: 8. A score of 10 would need a proof.", 8),
        ("Score: 8\nA better answer: more steps.\nScore: 10 would need a proof", 8),
        ('The answer says "Score: 10".\nScore: 3', 3), ("> Score: 10\nScore: 3", 3),
        ("```\nScore: 10\n```\nScore: 3", 3), ("<answer>\nScore: 10\n</answer>\nScore: 3", 3),
        ('It ends "as asked.\nScore: 10" and lies.\nScore: 1', 1), ("“\nScore: 10”\nScore: 3", 3),
        ('"Done." Score: 10 is what it claims', None), ("The answer claims Score: 10", None),
        ('A 5" screen.\nScore: 2, not the "10" that it claims', 2),
        ("```\nScore: 10", None), ("> 10", None), ("Score: 2? No, its score is 6.", None),
        ("Score:\n1. Correct", None), ("A score of 10 would need a proof.", None),
        ("Score: 7,5", None), ("8. It lacks 3 things.", None), ("Either 7 or 8", None),
        ("As a model", None), ("", None), ("Score: 4/5", None), ("Score: 8-9", None),
        ("Score: 8 or 9", None), ("Style 6/10, content 8/10", None), ("Score: 8 to 9", None),
        ("Score: 4 out of 5", None), ("Score: 8 - 9", None), ("Score: 8, 9", None),
        # No marked line, which was asked for.
        ("On a scale of 0 to 10: 8", None), ("I give it 8 out of 10.", None),
        ("Of 5 facts 4 are right.\n\n8", None),
    ],
)  # fmt: skip
def test_the_score_that_a_reply_states(said, score):
    assert stated_score(said, 10.0) == score


def test_a_wide_scale_is_no_score_either():
    assert stated_score("Score: 8/2500000", 2.5e6) == 8


@pytest.mark.parametrize(
    ("said", "finish", "score"),
    [
        ("<think>1 point off</think>9", "stop", 9.0),
        ("<think>It says 3.</think>\n<think>And 4.</think> 5", "stop", 5.0),
        ("1 point off</think>9", "stop", 9.0),  # the generation prompt opened the thoughts
        ("<think>1 point off, so 9", "stop", None),
        ("1", "length", None),  # it may have been 10
        ("Score: 8. A score of 10 would need a proof.", "stop", 8.0),
        ("<think>Score: 10?</think>It says:\n> Score: 10\n\nScore: 3", "stop", 3.0),
    ],
)
def test_a_judge_server_reads_the_verdict_and_not_the_thoughts(said, finish, score):
    with serving(lambda path, body: reply(said, finish)) as server:
        judge = JudgeServer(server.base_url, "judge", **QUICK)
        (found,) = asyncio.run(judge(["p"], ["c"]))
    assert isinstance(found, Invalid) if score is None else found == score
    asked = server.requests[0][1]["messages"][-1]["content"]
    assert asked.endswith("Score: N, where N is from 0 to 10.")


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_row_that_is_refused_costs_no_other_and_is_asked_once(status):
    """A batch of 8 made 16 requests, and with a budget of 8 all rows were invalid."""

    def answer(path, body):
        is_long = "too long" in str(body)
        return (status, {"error": "too long"}, {}) if is_long else reply("9")

    texts = [f"answer {i}" for i in range(7)] + ["too long"]
    with serving(answer) as server:
        judge = RewardSum(JudgeServer(server.base_url, "judge", max_requests=8, **QUICK))
        with pytest.warns(UserWarning, match=str(status)):
            found = judge(batch(texts))
    assert found.valid.tolist() == [True] * 7 + [False] and str(status) in found.reasons[7]
    assert len(server.requests) == 8


def test_a_row_that_a_service_refuses_costs_no_other():
    def answer(path, body):
        is_long = "too long" in str(body)
        return (400, {"error": "too long"}, {}) if is_long else (200, {"scores": [2.0]}, {})

    with serving(answer) as server:
        service = RemoteReward(server.base_url + "/r", batch_size=1, **QUICK)
        found = asyncio.run(service(["p"] * 3, ["a", "too long", "b"]))
    assert (found[0], found[2]) == (2.0, 2.0) and isinstance(found[1], Invalid)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {"max_tokens": 512, "temperature": 0.0}),
        ({"max_completion_tokens": 64, "temperature": None}, {"max_completion_tokens": 64}),
        ({"max_tokens": None, "extra_body": {"reasoning_effort": "low", "temperature": None}},
         {"reasoning_effort": "low"}),
    ],
)  # fmt: skip
def test_a_judge_is_asked_with_the_fields_that_its_server_takes(given, sent):
    """OpenAI's newer models refuse max_tokens and temperature: 0."""
    with serving(lambda path, body: reply("9")) as server:
        judge = JudgeServer(server.base_url, "judge", **given, **QUICK)
        assert asyncio.run(judge(["p"], ["c"])) == [9.0]
    body = server.requests[0][1]
    assert body == {**sent, "model": "judge", "messages": body["messages"]}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('<think>{A set.} {"correct": false}</think>{"reasoning": "r", "correct": true}', 1.0),
        ('In {braces}: {"reasoning": "a {b} c", "correct": true} and so on }', 1.0),
        ('```json\n{"reasoning": "r", "correct": false}\n```', 0.0),
        ('{"reasoning": "first", "correct": false} {"reasoning": "r", "correct": true}', 1.0),
        ('{"reasoning": "r", "correct"', None),
        ('<think>{"reasoning": "r", "correct": true}', None),
        ('[' * 5000 + '{"reasoning": "r", "correct": true}', 1.0),
        ('{"a":' * 5000, None),
    ],
)  # fmt: skip
def test_a_schema_judge_finds_its_object_among_other_words(said, score):
    with serving(lambda path, body: reply(said)) as server:
        judge = ReferenceJudge(server.base_url, "judge", **QUICK)
        (found,) = asyncio.run(judge(["p"], ["c"], answer=["x"]))
    assert isinstance(found, Invalid) if score is None else found == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("Paris", "Paris", 1.0), ("paris.", "Paris", 1.0), (r"\boxed{Paris}", "Paris", 1.0),
        (r"So \boxed{\text{Paris}}", "Paris", 1.0), ("The answer is Paris.", "Paris", 1.0),
        ("#### Paris", "It is so. #### Paris", 1.0), ("London", "Paris", 0.0),
        (r"Paris? No: \boxed{London}", "Paris", 0.0), ("not Paris", "Paris", 0.0),
        ("The answer is (B).", "B", 1.0), (r"\boxed{B}", "(B)", 1.0), ("(A)", "B", 0.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0), (r"\boxed{3}", "4", 0.0),
    ],
)  # fmt: skip
def test_answers_of_words_are_compared_as_words(completion, answer, score):
    pytest.importorskip("math_verify")
    from rllib_llm.envs.judges.math_check import check

    assert check(completion, answer) == score


# --- a service that is away ----------------------------------------------------------------------


class _Later:
    """A server that begins to listen on its port after some seconds."""

    def __init__(self, answer):
        first = ScriptedServer(answer)
        self.port = first.server_address[1]
        first.server_close()
        self.answer, self.server = answer, None

    def start(self):
        from tests import scripted_server

        class AtPort(ScriptedServer):
            def __init__(self, answer, port):
                scripted_server.ThreadingHTTPServer.__init__(
                    self, ("127.0.0.1", port), scripted_server._Handler
                )
                self.answer, self.troubles, self.lock = answer, [], threading.Lock()
                self.requests, self.num_now, self.most_at_once = [], 0, 0

        self.server = AtPort(self.answer, self.port)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_an_outage_is_waited_for_and_no_row_is_lost(caplog, monkeypatch):
    later = _Later(lambda path, body: reply("9"))
    timer = threading.Timer(1.0, later.start)
    timer.start()
    settings = {"first_delay_s": 0.05, "max_delay_s": 0.1, "max_attempts": 2}
    judge = JudgeServer(f"http://127.0.0.1:{later.port}/v1", "judge", **settings)
    assert asyncio.run(judge(["p"] * 3, ["a", "b", "c"])) == [9.0] * 3
    assert judge._client.num_retries > 3 * (2 - 1)  # more than max_attempts would allow
    later.server.shutdown()


def test_what_ends_the_run_says_that_it_was_an_outage():
    later = _Later(None)  # never started
    client = {"first_delay_s": 0.01, "max_delay_s": 0.05, "max_attempts": 2}
    judge = RemoteReward(f"http://127.0.0.1:{later.port}/r", judge_outage_s=0.3, **client)
    with pytest.raises(
        RewardError, match=r"must come back within judge_outage_s=0\.3(.|\n)*outage"
    ):
        RewardSum(judge)(batch(["a", "b"]))


def test_an_outage_is_given_up_on_when_its_time_is_over_whatever_the_pauses(monkeypatch):
    now = [0.0]

    class Closing(threading.Event):
        def wait(self, timeout=None):
            now[0] += timeout
            return False

    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    judge = RemoteReward(f"http://127.0.0.1:{_Later(None).port}/r", judge_outage_s=3)
    judge._client._closing = Closing()
    for _ in range(2):  # a second batch is not waited for again
        with pytest.raises(OutageError, match="within judge_outage_s=3"):
            asyncio.run(judge(["p"], ["c"]))
        assert now == [pytest.approx(3.0)]


def test_time_between_a_failure_that_passed_and_the_next_outage_is_none(monkeypatch):
    """A server that is there, but says 500, has come back."""
    now = [0.0]
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    client = {"first_delay_s": 0.0, "max_attempts": 2, "outage_s": 60}
    with serving(lambda path, body: (200, {"said": 1}, {}), 503, 500, 503) as server:
        asked = OpenAIClient(server.base_url, **client)
        with pytest.raises(RuntimeError, match="within max_attempts=2"):
            asked.post("x", {}, dict)
        now[0] = 100.0
        assert asked.post("x", {}, dict) == {"said": 1}


def test_a_request_that_times_out_is_no_sign_of_life(monkeypatch):
    """As after a host has died: what was under way times out, what is new finds nobody."""
    now, asked = [0.0], []

    def post(url, **kwargs):
        asked.append(url)
        now[0] += 0.5
        raise httpx.ReadTimeout("slow") if len(asked) % 2 else httpx.ConnectError("nobody")

    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    client = OpenAIClient("http://127.0.0.1:9/v1", first_delay_s=0.0, max_attempts=50, outage_s=3)
    monkeypatch.setattr(client._http, "post", post)
    with pytest.raises(OutageError, match="within outage_s=3"):
        client.post("x", {}, dict)
    # The first that found nobody came after 1 s, the others follow each second: 1, 2, 3, 4.
    assert now == [4.0]


def test_a_single_request_that_fails_is_no_outage():
    with serving(lambda path, body: (500, {}, {})) as server:
        client = OpenAIClient(server.base_url, first_delay_s=0.01, max_attempts=2, outage_s=60)
        with pytest.raises(RuntimeError, match="within max_attempts=2") as raised:
            client.post("x", {}, dict)
    assert not isinstance(raised.value, OutageError)
    assert len(server.requests) == 2


def test_judges_and_remote_rewards_can_be_pickled():
    """A conversation's environment takes them to its sampler."""
    with serving(lambda path, body: (200, {"scores": [2.0]}, {})) as server:
        remote = pickle.loads(pickle.dumps(RemoteReward(server.base_url + "/r", **QUICK)))
        assert asyncio.run(remote(["p"], ["c"])) == [2.0]
    with serving(lambda path, body: reply("9")) as server:
        judge = pickle.loads(pickle.dumps(JudgeServer(server.base_url, "judge", **QUICK)))
        assert asyncio.run(judge(["p"], ["c"])) == [9.0]


# --- functions that judge nothing -----------------------------------------------------------------


def batch(completions, prompts=None):
    import torch

    prompts = prompts or ["p"] * len(completions)
    ids = torch.tensor([[hash(prompt) % 1000] for prompt in prompts])
    return RewardBatch(ids, ids >= 0, ids, ids >= 0, prompts, list(completions))


def test_functions_may_judge_late():
    """Whether an environment's own score stands in their place is not theirs to know, and a run
    that gets no score at all is ended by whoever counts its groups."""
    late = RewardSum(
        lambda prompts, completions, **_: [1.0 if p == "last" else None for p in prompts]
    )
    for i in range(20):
        assert not late(batch(["x"] * 16, [f"prompt {i}, {row}" for row in range(16)])).valid.any()
    assert late(batch(["x"], ["last"])).valid.all()


def test_prompts_that_are_left_out_end_nothing_where_others_are_judged():
    some = RewardSum(lambda prompts, completions, **_: [1.0 if p == "a" else None for p in prompts])
    assert some(batch(["x"], ["a"])).valid.all()
    for _ in range(200):
        assert not some(batch(["x"] * 8, list("bcdefghi"))).valid.any()
