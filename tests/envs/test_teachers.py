"""Teachers beside the exact one: in fewer bits, behind the project's own server, and several."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.envs.frozen_models import FrozenTeacher, ServedTeacher
from rllib_llm.rollouts.judged_batch import SampleRequest, concatenate
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems, errors_of
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


@pytest.mark.parametrize("bits", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
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


FIRST, SECOND = f"{tiny_runs.HERE}.build_teacher", tiny_runs.MODEL
OF_ROWS = [{**row, "domain": "ab"[i % 2]} for i, row in enumerate(tiny_runs.PROMPTS)]


def as_told(found, rows, model):
    """Asserts that these rows are what a teacher alone says of them."""
    given = [found[name][rows] for name in NAMES]
    mask = given[3]
    for name, column in FrozenTeacher(model).judge(*given, top_k=4).items():
        torch.testing.assert_close(found[name][rows][mask], column[mask], rtol=1e-4, atol=1e-5)


def test_a_column_names_the_teacher_of_each_row():
    teacher = {"column": "domain", "models": {"a": FIRST, "b": {"model": SECOND}}}
    config = distill(teacher=teacher, teacher_in="environment", teacher_top_k=4)
    runner = build_sampler(config.prompts(data=OF_ROWS))
    batch = runner.sampler.sample(SampleRequest(0, 6, 2))
    runner.stop()
    found = batch.columns
    is_first = found[columns.PROMPT_INDEX] % 2 == 0
    assert 0 < int(is_first.sum()) < len(is_first)
    as_told(found, is_first, FIRST)
    as_told(found, ~is_first, SECOND)
    learner = tiny_learners.build(config)
    assert tiny_learners.update(learner, found)["loss/distill_avg"] > 0


def test_a_row_that_names_no_teacher_is_refused():
    teacher = {"column": "domain", "models": {"a": FIRST}}
    config = distill(teacher=teacher, teacher_in="environment")
    runner = build_sampler(config.prompts(data=OF_ROWS))
    with pytest.raises(Problems) as error:
        runner.sampler.sample(SampleRequest(0, 6, 2))
    runner.stop()
    assert (error.value.found[0].name, error.value.found[0].value) == ("domain", "b")


def test_each_environment_has_a_teacher_of_its_own():
    prompts = {"data": OF_ROWS, "max_prompt_len": 8}
    config = distill(teacher=FIRST, teacher_in="environment", teacher_top_k=4)
    config.env_config = {}
    config.environments(
        sums={"prompts": prompts},
        letters={"prompts": prompts, "teacher": {"model": SECOND}},
        hints={"prompts": {**prompts, "column": "prompt"}, "distillation": {
            "teacher_prompt": "domain"}},
    )  # fmt: skip
    runner = build_sampler(config)
    batches = [runner.sampler.of(request).sample(request) for request in
               (SampleRequest(0, 3, 2, env=env) for env in range(3))]  # fmt: skip
    runner.stop()
    for batch, model in zip(batches[:2], (FIRST, SECOND), strict=True):
        as_told(batch.columns, slice(None), model)
    joined = concatenate(batches).columns  # some rows have prompts for their teacher
    widths = [joined[name].sum(1) for name in (columns.PROMPT_MASK, columns.TEACHER_PROMPT_MASK)]
    assert torch.equal(widths[0][:12], widths[1][:12])
    assert (widths[1][12:] == 1).all()


def names_of(config):
    return {problem.name for problem in errors_of(config.problems())}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"teacher": {"column": "domain", "models": {"a": FIRST}}}, "teacher"),
        ({"teacher": {"column": "domain", "models": {}}, "teacher_in": "environment"}, "teacher"),
        ({"teacher": {"models": {"a": FIRST}}, "teacher_in": "environment"}, "teacher"),
        ({"teacher": {"column": "x", "models": {"a": {"modle": FIRST}}},
          "teacher_in": "environment"}, "teacher.models.a"),
        ({"teacher": {"column": "x", "models": {"a": {"model": FIRST, "bits": 4}}},
          "teacher_in": "environment"}, "teacher.models.a.bits"),
    ],
)  # fmt: skip
def test_several_teachers_are_named_in_the_environment(settings, name):
    assert names_of(distill(**settings)) == {name}


def test_teachers_of_environments_are_in_the_environment():
    config = distill(teacher=FIRST)
    prompts = config.env_config
    config.env_config = {}
    config.environments(sums={"env_config": prompts, "teacher": SECOND})
    assert names_of(config) == {"envs.sums.teacher"}
    assert not names_of(config.distillation(teacher=None, teacher_in="environment"))
    config.environments(letters={"env_config": prompts})
    assert names_of(config) == {"envs.letters.teacher"}
