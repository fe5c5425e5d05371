"""One pair of learner processes for many tests: each test builds its own learners in them."""

from __future__ import annotations

import copy
import faulthandler
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_llm.examples import arithmetic
from rllib_llm.learners.learner_group import LearnerError
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny

MODEL = f"{__name__}.build_model"
TEXTS = [{"text": text} for text in ("1+2=3", "44+3=47", "5", "17-1=16", "2*3=6", "9+9=18", "0=0")]
SECONDS = 600.0  # that a call may take: a machine with other work is slow, only a hang is a fault
SPACES = {DEFAULT_MODULE_ID: (tiny.SPACE, tiny.SPACE)}


def build_model():
    """Two layers and tied embeddings: shards, and a tensor that two of its names share."""
    model, tokenizer = arithmetic.build_model(
        3, hidden_size=16, num_layers=2, num_heads=2, max_len=32
    )
    return model, tokenizer


def ppo_ptx(**training: Any):
    """Every loss there is, a norm that is clipped, mini-batches of which the last is smaller."""
    settings = {
        "minibatch_size": 3,
        "micro_batch_size": 2,
        "num_epochs": 2,
        "grad_clip": 0.05,
        "adam_epsilon": 1e-3,  # of the gradients' size: round-off in them stays round-off
        "entropy_coeff": 0.01,
        "ptx_data": TEXTS,
        "ptx_coeff": 0.5,
        "ptx_batch_size": 3,
        **training,
    }
    return tiny_runs.ppo(**settings).language_model(model=MODEL)


def grpo(**training: Any):
    settings = {
        "minibatch_size": 3,
        "micro_batch_size": 2,
        "grad_clip": 0.05,
        "adam_epsilon": 1e-3,
        "off_policy": "decoupled",
        "off_policy_weights": None,
        **training,
    }
    return tiny_runs.grpo(**settings).language_model(model=MODEL)


def dpo(**training: Any):
    settings = {"minibatch_size": 3, "micro_batch_size": 2, "adam_epsilon": 1e-3, **training}
    return tiny_runs.dpo(**settings).language_model(model=MODEL)


def alone(config):
    """The same settings for one learner: what is counted per learner, it has twice."""
    config = config.copy(copy_frozen=False)
    config.num_learners = 0
    config.minibatch_size *= 2
    if hasattr(config, "ptx_batch_size"):
        config.ptx_batch_size *= 2
    return config


def paired(config, strategy: str):
    config = config.copy(copy_frozen=False).fault_tolerance(learner_timeout_s=SECONDS)
    return config.learners(strategy=strategy, num_learners=2)


@contextmanager
def learner_group(config) -> Iterator[Any]:
    """The LearnerGroup of a config, shut down at the end."""
    group = config.build_learner_group(spaces=SPACES)
    try:
        yield group
    finally:
        group.shutdown()


def multi_agent(batch: dict[str, torch.Tensor]) -> MultiAgentBatch:
    rows = SampleBatch(copy.deepcopy(batch))
    return MultiAgentBatch({DEFAULT_MODULE_ID: rows}, env_steps=len(rows))


def train(learner, batches) -> list[dict[str, float]]:
    return [tiny.update(learner, batch) for batch in batches]


def train_new(learner, config, batches, state=None) -> dict[str, Any]:
    """In a learner process: what a new learner of `config` becomes on `batches`."""
    new = config.build_learner(spaces=SPACES)
    if state is not None:
        new.set_state(state)
    train(new, batches)
    return new.get_state()


def of_new(learner, config, function) -> Any:
    """In a learner process: what a function gives of a new learner of `config`."""
    return function(config.build_learner(spaces=SPACES))


def in_both(group, function, *arguments) -> Any:
    """The first learner's answer to `function(learner, *arguments)`, called in both. Where they
    hang, it prints in which lines."""
    with tempfile.TemporaryDirectory() as folder:

        def watched(learner):
            with open(f"{folder}/{learner.rank}", "w") as stacks:
                faulthandler.dump_traceback_later(SECONDS / 2, file=stacks)
                try:
                    return function(learner, *arguments)
                finally:
                    faulthandler.cancel_dump_traceback_later()

        try:
            results = group.foreach_learner(watched)
        except LearnerError:
            for path in sorted(Path(folder).iterdir()):
                print(f"learner {path.name}:\n{path.read_text()}")
            raise
    answers = [result.get() for result in results]
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if errors:
        raise errors[0]
    return answers[0]


def group_update(group, batch) -> None:
    reference = ray.put(multi_agent(batch))
    group.update(batch_refs=[reference] * 2)


def assert_same_state(one: dict[str, Any], other: dict[str, Any], **tolerance: float) -> None:
    """Weights and both moments of Adam, by default to float32 round-off of a few updates."""
    tolerance = {"rtol": 1e-4, "atol": 1e-6, **tolerance}
    modules = [state["rl_module"][DEFAULT_MODULE_ID] for state in (one, other)]
    assert modules[0].keys() == modules[1].keys()
    for name, tensor in modules[0].items():
        torch.testing.assert_close(tensor, modules[1][name], **tolerance, msg=lambda m, n=name:
                                   f"{n}: {m}")  # fmt: skip
    moments = [next(iter(s["optimizer"].values()))["state"]["state"] for s in (one, other)]
    assert moments[0].keys() == moments[1].keys()
    for number, entry in moments[0].items():
        for name, tensor in entry.items():
            torch.testing.assert_close(
                torch.as_tensor(tensor), torch.as_tensor(moments[1][number][name]), **tolerance
            )


def judged_batches(learner, lengths=(3, 5, 1, 4, 2, 5, 3), num: int = 2):
    """Batches as the learner's own policy at first would give them; 7 rows are no multiple of
    anything here."""
    batches = [tiny.judged(learner, lengths, seed=seed) for seed in range(num)]
    batches[0][columns.VALID][2] = False  # a row whose judge failed
    return batches
