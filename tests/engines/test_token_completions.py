"""Tokens of a server: what is taken to be learnt from, and what is asked for again."""

from __future__ import annotations

import pytest

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row
from rllib_llm.engines.servers import TokenCompletions, read_label
from rllib_llm.shared.openai_client import ServerError
from tests.scripted_server import serving

PARAMS = SamplingParams(0, (2, 5), max_new_tokens=4, temperature=0.5, top_k=3)
QUICK = {"first_delay_s": 0.01, "max_attempts": 3}
NOISE = Noise(7, 11, 1)


def answer(ids=(8, 9, 2), label="4.3", **changes):
    entries = [{"token": f"token_id:{i}", "logprob": -0.5 * i} for i in ids]
    choice = {
        "token_ids": list(ids), "finish_reason": "stop", "logprobs": {"content": entries},
        "weight_versions": [{"version": label, "start": 0, "end": len(ids)}], **changes,
    }  # fmt: skip
    return {"choices": [choice]}


def completed(*answers, weights=None, **settings):
    """(what came of it, requests): the server gives these answers, the last one for ever."""
    left = list(answers)

    def answer_next(path, body):
        return 200, left.pop(0) if len(left) > 1 else left[0], {}

    with serving(answer_next) as server:
        client = TokenCompletions(base_url=server.base_url, **QUICK, **settings)
        try:
            ended = client.submit(Row(0, [1, 6], PARAMS, noise=NOISE, published=weights)).result()
        finally:
            client.close()
    return ended, server.requests


def test_tokens_log_probs_and_versions_are_taken_as_they_are():
    spans = [{"version": "4.2", "start": 0, "end": 1}, {"version": "step-3", "start": 1, "end": 3}]
    ended, requests = completed(answer(weight_versions=spans), served_model="m")
    assert (ended.token_ids, ended.logprobs) == ([8, 9, 2], [-4.0, -4.5, -1.0])
    assert (ended.versions, ended.finish) == ([2, 3, 3], "stop")
    ((path, body, headers),) = requests
    assert path == "/inference/v1/generate" and "X-Min-Weight-Version" not in headers
    assert body == {
        "model": "m",
        "token_ids": [1, 6],
        "sampling_params": {
            "max_tokens": 4, "min_tokens": 0, "temperature": 0.5, "top_p": 1.0, "top_k": 3,
            "stop_token_ids": [2, 5], "ignore_eos": True, "logprobs": 0, "seed": 7, "noise_row": 11,
            "noise_turn": 1,
        },
    }  # fmt: skip


def test_a_server_that_does_not_know_our_noise_is_given_a_seed_for_each():
    _, ((_, body, _),) = completed(answer(), exact_noise=False, extra_params={"top_k": 9})
    assert body["sampling_params"]["seed"] == Noise(7, 11, 1).one_seed
    assert "noise_row" not in body["sampling_params"] and body["sampling_params"]["top_k"] == 9


def test_the_run_s_newest_weights_are_waited_for_and_others_are_no_answer():
    old, other = answer(label="4.2"), answer(label="3.3")
    ended, requests = completed(old, other, answer(), weights=(4, 3), follows_run=True)
    assert ended.versions == [3, 3, 3] and len(requests) == 3
    assert {headers["X-Min-Weight-Version"] for _, _, headers in requests} == {"4.3"}
    with pytest.raises(ServerError, match="weights 4.2 sampled it, not 4.3"):
        completed(old, weights=(4, 3), follows_run=True)
    # A server without epochs, that was told of the version.
    assert (
        completed(answer(label="step-3"), weights=(4, 3), follows_run=True)[0].versions == [3] * 3
    )


def test_adapters_are_asked_for_by_their_version():
    """The spans of such an answer are of the trunk's weights, its model names the adapters."""
    trunk = answer(label="default")
    mine, other = ({**trunk, "model": f"p@4.{version}"} for version in (3, 2))
    asked = {"weights": (4, 3), "follows_run": True, "adapters": "p"}
    ended, requests = completed(other, mine, **asked)
    assert ended.versions == [3, 3, 3]
    assert [body["model"] for _, body, _ in requests] == ["p@4.3"] * 2
    with pytest.raises(ServerError, match="weights p@4.2 sampled it, not 4.3"):
        completed(other, **asked)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"finish_reason": "abort"}, "finish_reason='abort'"),
        ({"token_ids": []}, "with 0 tokens"),
        ({"token_ids": [8, 9, 3]}, "the log-probs are not those of the tokens"),
        ({"logprobs": None}, "malformed"),
        ({"logprobs": {"content": []}}, "the log-probs are not those of the tokens"),
        ({"weight_versions": None}, "malformed"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 2}]}, "do not cover 3 tokens"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 3}]}, "do not cover"),
        ({"weight_versions": [{"version": "new", "start": 0, "end": 3}]}, "no number at its end"),
    ],
)
def test_what_cannot_be_learnt_from_is_no_answer(changes, problem):
    with pytest.raises(ServerError, match=problem):
        completed(answer(**changes))


def test_labels_of_versions():
    assert [read_label(label) for label in ("2.31", "step-31", "31", 7)] == [
        (2, 31), (None, 31), (None, 31), (None, 7),
    ]  # fmt: skip
