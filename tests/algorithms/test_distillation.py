"""Runs of Distillation: on policy, with a share of data, with a teacher in the environment or on a
server, and by itself with a richer prompt."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from rllib_llm.algorithms.distillation import DistillationConfig
from rllib_llm.envs.frozen_models import FrozenTeacher, ServedTeacher
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.conversations import family_models
from tests.conversations.family_models import Chatty
from tests.learners import tiny_learners

TEACHER = f"{tiny_runs.HERE}.build_teacher"
PROMPTS = [{**row, "hint": row["prompt"] + row["prompt"]} for row in tiny_runs.PROMPTS]
HINTED = [{**row, "hint": f"{row['prompt']} She is well."} for row in family_models.PROMPTS]


def config(**distillation):
    made = DistillationConfig().language_model(model=tiny_runs.MODEL)
    made.prompts(data=PROMPTS, max_prompt_len=8)
    made.sampling(max_new_tokens=5, log_samples_every=0)
    made.training(train_batch_size_per_learner=12, lr=3e-2)
    return made.distillation(**{"teacher": TEACHER, **distillation})


@pytest.fixture(autouse=True)
def _ray(ray_session):
    """A Ray of this process."""


def test_the_policy_comes_near_to_its_teacher_without_rewards():
    with tiny_runs.built(config()) as algorithm:
        results = [algorithm.train() for _ in range(25)]
    first, last = results[0]["train"], results[-1]["train"]
    assert last["teacher_kl"] < 0.6 * first["teacher_kl"]
    assert {"teacher_kl", "teacher_agreement"} <= last.keys()


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_share_of_the_batch_is_the_data_s(share):
    made = config(on_policy_share=share, distill_data=tiny_runs.TEXTS, beta=0.0)
    seen = []
    with tiny_runs.built(made) as algorithm:
        learn = algorithm.learn
        algorithm.learn = lambda batch: (seen.append(batch), learn(batch))[1]
        results = [algorithm.train() for _ in range(4)]
        state = algorithm.rollouts.state()
        with tiny_runs.built(made) as again:
            again.set_state(algorithm.get_state())
            next_rows = [each.rollouts.next().columns for each in (again, algorithm)]
    for batch in seen:
        is_data = batch.columns[columns.FROM_DATA]
        assert is_data.sum() == 12 * (1 - share) and len(is_data) == 12
    assert state["data_position"] == 4 * 12 * (1 - share)
    assert all(result["loss"]["distill_avg"] > 0 for result in results)
    data = [each[columns.COMPLETION_IDS][each[columns.FROM_DATA]] for each in next_rows]
    assert torch.equal(*data)


def test_sampled_rows_beside_data_are_those_of_their_environments():
    made = config(on_policy_share=0.5, distill_data=tiny_runs.TEXTS, beta=0.0)
    made.environments(one={}, other={})
    with tiny_runs.built(made) as algorithm:
        batch = algorithm.rollouts.next()
        of = algorithm.train()["env"]
    sampled = ~batch.columns[columns.FROM_DATA]
    assert {*batch.columns[columns.ENVIRONMENT][sampled].tolist()} == {0, 1}
    assert of["one/episodes"] + of["other/episodes"] == 6


def test_a_teacher_in_the_environment_reads_its_own_prompts():
    made = config(teacher_in="environment", teacher_top_k=5, teacher_prompt="hint")
    with tiny_runs.built(made) as algorithm:
        batch = algorithm.rollouts.next()
        found = batch.columns
        teacher = FrozenTeacher(TEACHER)
        given = (columns.TEACHER_PROMPT_IDS, columns.TEACHER_PROMPT_MASK,
                 columns.COMPLETION_IDS, columns.COMPLETION_MASK)  # fmt: skip
        expected = teacher.judge(*(found[name] for name in given), top_k=5)
        mask = found[columns.COMPLETION_MASK]
        for name, column in expected.items():
            torch.testing.assert_close(found[name][mask], column[mask])
        assert found[columns.TEACHER_PROMPT_MASK].sum(1).max() > found[
            columns.PROMPT_MASK].sum(1).max()  # fmt: skip
        assert algorithm.train()["train"]["teacher_kl"] > 0


def test_the_policy_teaches_itself_with_a_hint():
    with tiny_runs.built(config(teacher="policy", teacher_prompt="hint")) as algorithm:
        results = [algorithm.train() for _ in range(2)]
    assert results[0]["train"]["teacher_kl"] > 1e-6  # a random model hardly minds its prompt


class Server(BaseHTTPRequestHandler):
    """`prompt_logprobs` of a local teacher, as vLLM gives them."""

    teacher: FrozenTeacher

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, k = torch.tensor([asked["prompt"]]), asked["prompt_logprobs"]
        every = torch.ones_like(ids, dtype=torch.bool)
        told = self.teacher.judge(ids[:, :1], every[:, :1], ids[:, 1:], every[:, 1:], top_k=k)
        answer = [None]
        for i, token in enumerate(asked["prompt"][1:]):
            top = zip(told[columns.TEACHER_TOP_IDS][0, i].tolist(),
                      told[columns.TEACHER_TOP_LOGPROBS][0, i].tolist(), strict=True)  # fmt: skip
            named = {str(one): {"logprob": logprob} for one, logprob in top}
            named[str(token)] = {"logprob": float(told[columns.TEACHER_LOGPROBS][0, i])}
            answer.append(named)
        body = json.dumps({"choices": [{"prompt_logprobs": answer}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_served_teacher_says_what_a_local_one_says():
    pytest.importorskip("httpx")
    Server.teacher = FrozenTeacher(TEACHER)
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    batch = tiny_learners.completions()
    names = (columns.PROMPT_IDS, columns.PROMPT_MASK, columns.COMPLETION_IDS,
             columns.COMPLETION_MASK)  # fmt: skip
    given = [batch[name] for name in names]
    served = ServedTeacher("x", url=f"http://127.0.0.1:{server.server_port}/v1")
    try:
        found = served.judge(*given, top_k=4)
    finally:
        served.close()
        server.shutdown()
    expected = Server.teacher.judge(*given, top_k=4)
    mask = batch[columns.COMPLETION_MASK]
    for name, column in expected.items():
        torch.testing.assert_close(found[name][mask], column[mask], rtol=1e-4, atol=1e-5)


class Corrected(Chatty):
    """Its teacher is told what it made of the answers."""

    def teacher_messages(self, conversation):
        return f"{conversation.task['prompt']} You earned {conversation.total_reward}."


@pytest.mark.slow  # conversations of three turns
def test_the_policy_teaches_itself_in_conversations():
    """With a column, and with what the environment says; tools' tokens are read, not learnt."""
    results = []
    for env, given in (
        (Chatty, {"prompts": HINTED, "teacher_prompt": "hint"}), (Corrected, {}),
    ):  # fmt: skip
        made = DistillationConfig().language_model(model=f"{family_models.__name__}.build_chatml")
        made.environment(env, env_config={"max_concurrent": 1, **given})
        made.sampling(max_new_tokens=12, log_samples_every=0, stop_token_ids=[*range(300, 400)])
        made.training(train_batch_size_per_learner=4, lr=1e-3)
        made.distillation(teacher="policy")
        with tiny_runs.built(made) as algorithm:
            batch = algorithm.rollouts.next().columns
            asked = [batch[name].sum(1) for name in
                     (columns.PROMPT_MASK, columns.TEACHER_PROMPT_MASK)]  # fmt: skip
            assert (asked[1] > asked[0]).all()
            assert (batch[columns.COMPLETION_MASK] & ~batch[columns.LOSS_MASK]).any()
            results.append(algorithm.train()["train"])
    assert all(result["teacher_kl"] > 1e-6 for result in results)
