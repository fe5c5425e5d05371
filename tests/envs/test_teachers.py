"""Teachers beside the exact one: in fewer bits, and behind the project's own server."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.frozen_models import FrozenTeacher, ServedTeacher
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners
from tests.learners.test_distillation import distill, judged
from tests.rollouts.tiny_samplers import build_sampler
from tests.serving import tiny_server

NAMES = (columns.PROMPT_IDS, columns.PROMPT_MASK, columns.COMPLETION_IDS, columns.COMPLETION_MASK)
MODEL = "tests.serving.tiny_server.build"


def test_a_teacher_in_eight_bits_says_nearly_what_the_exact_one_says():
    """Eight bits round a weight by at most 1/254 of the largest of its row: 0.2 % of a typical
    weight's size in each of the layers, against log-probs that are spread over nats."""
    batch = tiny_learners.completions()
    given, mask = [batch[name] for name in NAMES], batch[columns.COMPLETION_MASK]
    exact, rounded = (
        FrozenTeacher(MODEL, quantization=bits).judge(*given, top_k=4) for bits in ("none", "int8")
    )
    name = columns.TEACHER_LOGPROBS
    gap = (exact[name] - rounded[name])[mask].abs()
    assert 0 < float(gap.mean()) < 0.02 * float(exact[name][mask].std())


@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_a_learner_s_teacher_in_fewer_bits_gives_nearly_the_same_loss(bits):
    if bits == "nf4":
        pytest.importorskip("bitsandbytes")
    teacher = "tests.algorithms.tiny_runs.build_teacher"
    exact, rounded = (
        tiny_learners.build(distill(teacher={"model": teacher, "quantization": each}))
        for each in ("none", bits)
    )
    batch = judged(exact)
    losses = [tiny_learners.update(one, batch)["loss/distill_avg"] for one in (exact, rounded)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel={"int8": 0.02, "nf4": 0.2}[bits])


def test_a_teacher_behind_our_own_server_says_what_a_local_one_says():
    """The likeliest tokens and the sampled one at temperature 1, over HTTP."""
    batch = tiny_learners.completions()
    given, mask = [batch[name] for name in NAMES], batch[columns.COMPLETION_MASK]
    with tiny_server.running(tiny_server.service()) as address:
        served = ServedTeacher(tiny_server.NAME, url=f"{address}/v1")
        try:
            found = served.judge(*given, top_k=4)
        finally:
            served.close()
    expected = FrozenTeacher(MODEL).judge(*given, top_k=4)
    for name, column in expected.items():
        torch.testing.assert_close(found[name][mask], column[mask], rtol=1e-4, atol=1e-5)


def test_an_iteration_with_a_teacher_behind_our_own_server():
    """From the sampler's environment, which asks the server, to the learner's loss: what it is with
    the same teacher as a folder."""
    model, tokenizer = tiny_runs.build_teacher()
    losses, batches = [], []
    with tiny_server.running(tiny_server.service(model, tokenizer)) as address:
        for teacher in (
            {"model": tiny_server.NAME, "url": f"{address}/v1"},
            {"model": f"{tiny_runs.HERE}.build_teacher"},
        ):
            config = distill(teacher=teacher, teacher_in="environment", teacher_top_k=4)
            runner = build_sampler(config)
            batches.append(runner.sampler.sample(SampleRequest(0, 4, 3)).columns)
            runner.stop()
            learner = tiny_learners.build(config)
            losses.append(tiny_learners.update(learner, batches[-1])["loss/distill_avg"])
    assert torch.equal(*(batch[columns.COMPLETION_IDS] for batch in batches))
    assert losses[0] > 0 and losses[0] == pytest.approx(losses[1], rel=1e-4)
