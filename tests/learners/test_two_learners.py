"""Two learners are one: the same weights and moments after several updates, whole or in shards."""

from __future__ import annotations

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.data.preferences import PromptedPairSource
from rllib_llm.examples.characters import CHAT_SPECIAL, character_tokenizer
from rllib_llm.learners.batching import take_rows
from rllib_llm.modules.shards import local_data
from rllib_llm.shared import columns
from rllib_llm.weights.flat_buffer import join, unpack
from rllib_llm.weights.publisher import WeightsPublisher
from rllib_llm.weights.receiver import WeightsReceiver
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny
from tests.learners import two_learners as two
from tests.learners.test_trl_images import completions
from tests.modules.test_multimodal import tiny as tiny_model

pytestmark = pytest.mark.slow  # learners in processes of their own
LORA = {"r": 4, "alpha": 8}


@pytest.fixture(scope="module")
def group(ray_session):
    """Two FSDP learners of PPO-ptx, in processes of their own."""
    with two.learner_group(two.paired(two.ppo_ptx(), "fsdp")) as group:
        yield group


@pytest.fixture(scope="module")
def one_and_batches():
    """The state that one learner comes to in two updates, and the batches."""
    learner = tiny.build(two.alone(two.ppo_ptx()))
    batches = two.judged_batches(learner)
    start = learner.get_state()
    start = {**start, "rl_module": _copied(start["rl_module"])}
    two.train(learner, batches)
    return learner.get_state(), batches, start


def _copied(modules):
    return {
        module_id: {name: tensor.clone() for name, tensor in tensors.items()}
        for module_id, tensors in modules.items()
    }


def test_learner_group_of_shards_learns_publishes_and_saves(group, one_and_batches, tmp_path):
    state, batches, _ = one_and_batches
    for batch in batches:
        two.group_update(group, batch)
    sharded = group.get_state()["learner"]
    two.assert_same_state(sharded, state)

    received = {}
    published = WeightsPublisher(group, shared_module=False).publish(2)
    WeightsReceiver().receive(published, lambda flat: received.update(unpack(flat)))
    whole = sharded["rl_module"][DEFAULT_MODULE_ID]
    assert set(received) == {name for name in whole if name.startswith("model.")}
    for name, tensor in received.items():
        assert torch.equal(tensor, whole[name])

    # A checkpoint of two with shards is one of a single learner, and the reverse.
    path = group.save_to_path(tmp_path / "of_two")
    learner = tiny.build(two.alone(two.ppo_ptx()))
    learner.restore_from_path(f"{path}/learner")
    two.assert_same_state(learner.get_state(), sharded, rtol=0, atol=0)
    two.train(learner, batches)
    learner.save_to_path(tmp_path / "of_one" / "learner")
    for batch in batches:
        two.group_update(group, batch)
    two.assert_same_state(group.get_state()["learner"], learner.get_state())
    group.restore_from_path(path)  # back to before these updates
    two.assert_same_state(group.get_state()["learner"], sharded, rtol=0, atol=0)
    group.set_state({"learner": learner.get_state()})
    two.assert_same_state(group.get_state()["learner"], learner.get_state(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "config, strategy",
    [
        (two.ppo_ptx(), "ddp"),
        (two.grpo(), "ddp"),
        (two.grpo().language_model(gradient_checkpointing=True), "fsdp"),
        (two.ppo_ptx(critic="separate", ptx_coeff=0.0), "fsdp"),
        (two.grpo(ref_kl_estimator="full").language_model(lora=LORA), "fsdp"),
        (two.grpo(ref_kl_estimator="full", reference_in="learner"), "ddp"),
        (two.grpo(ref_kl_estimator="full", reference_in="learner"), "fsdp"),
        (two.grpo(ref_kl_estimator="full", reference_in="learner", reference_update_every=2,
                  reference_update_mix=0.3, teacher="policy", distill_coeff=0.5,
                  teacher_update_every=1), "fsdp"),
        (two.grpo(teacher="tests.algorithms.tiny_runs.build_teacher", distill_coeff=0.5,
                  distill_beta=0.5, top_entropy_share=0.5, mask_truncated=True,
                  entropy_target=50.0), "fsdp"),
    ],
    ids=[
        "ppo-ddp",
        "grpo-ddp",
        "grpo-fsdp",
        "ppo-fsdp-critic",
        "lora-fsdp",
        "full-kl-ddp",
        "full-kl-fsdp",
        "moving-averages-fsdp",
        "teacher-fsdp",
    ],
)  # fmt: skip
def test_two_learners_come_to_the_same_state(group, config, strategy):
    learner = tiny.build(two.alone(config))
    # Groups of three completions for GRPO: the last mini-batch has one group for two learners.
    batches = two.judged_batches(learner, lengths=(3, 5, 1, 4, 2, 5, 3, 3, 2))
    two.train(learner, batches)
    state = two.in_both(group, two.train_new, two.paired(config, strategy), batches)
    two.assert_same_state(state, learner.get_state())


def build_seeing():
    """A Gemma 3 with a tower."""
    return tiny_model("gemma3"), character_tokenizer("0123", special=CHAT_SPECIAL)


@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_learners_see_what_one_does(group, strategy, train_vision):
    config = two.grpo(minibatch_size=2, micro_batch_size=1, ref_kl_coeff=0.1).language_model(
        model=f"{__name__}.build_seeing", train_vision=train_vision
    )
    whole = completions("gemma3")[1]
    batches = [take_rows(whole, torch.tensor(rows)) for rows in ([0, 1, 2, 3], [2, 3, 0, 1])]
    learner = tiny.build(two.alone(config))
    two.train(learner, batches)
    state = two.in_both(group, two.train_new, two.paired(config, strategy), batches)
    # What a tower has and never uses (SigLIP's last norm) has zeros with two, nothing with one.
    (optimizer,) = state["optimizer"].values()
    moments = optimizer["state"]["state"]
    for number in [n for n, moment in moments.items() if not moment["exp_avg_sq"].any()]:
        del moments[number]
    two.assert_same_state(state, learner.get_state())


def buckets_sent_after_each_pass(learner, config, batches):
    """In a learner process: of a new learner of `config`, whose model is one bucket."""
    sent = []

    class Counting(config.get_default_learner_class()):
        def backward(self, loss):
            super().backward(loss)
            sent.append(self._sums.num_sent)

    new = config.copy(copy_frozen=False).learners(learner_class=Counting)
    two.train(new.build_learner(spaces=two.SPACES), batches)
    return sent


@pytest.mark.parametrize("config, num_passes", [
    # Mini-batches of 6 and 3 rows; micro-batches of 2 of each learner's, then of 2 and 1.
    (two.grpo(num_epochs=1).language_model(lora=LORA), 3),
    (two.grpo(num_epochs=1).language_model(mixed_precision="bf16"), 3),
    # After these the texts', three of each learner, which give the value head no gradient.
    (two.ppo_ptx(num_epochs=1), 7),
], ids=["lora", "bf16", "ppo-ptx"])  # fmt: skip
def test_gradients_are_sent_in_the_last_backward_pass(group, config, num_passes):
    batch = two.judged_batches(tiny.build(two.alone(config)), (3, 5, 1, 4, 2, 5, 3, 3, 2), 1)
    sent = two.in_both(
        group, buckets_sent_after_each_pass, two.paired(config, "ddp"), batch
    )  # fmt: skip
    assert len(sent) == num_passes
    assert sent[-1] == 1 and sent.count(1) == 2, sent  # in the last pass of each mini-batch


def held_of_reference(learner):
    """Numbers that a learner holds of its reference, and how many that has."""
    parameters = list(learner.reference.model.parameters())
    held = sum(local_data(parameter).numel() for parameter in parameters)
    return held, sum(parameter.numel() for parameter in parameters)


def test_a_reference_in_the_learners_is_spread_over_them(group):
    config = two.paired(two.grpo(reference_in="learner"), "fsdp")
    held, whole = two.in_both(group, two.of_new, config, held_of_reference)
    model = two.build_model()[0]
    in_layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert whole == sum(parameter.numel() for parameter in model.parameters())
    assert held == whole - in_layers // 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_learners_of_pairs_are_one(group, strategy):
    config = two.dpo(loss_type="kto")
    learner = tiny.build(two.alone(config))
    tokenizer = two.build_model()[1]
    source = PromptedPairSource(tiny_runs.PAIRS, tokenizer=tokenizer, max_length=16)
    batches = [source.batch(position, 7) for position in (0, 7)]
    two.train(learner, batches)
    state = two.in_both(group, two.train_new, two.paired(config, strategy), batches)
    two.assert_same_state(state, learner.get_state())


def test_a_learner_without_rows_hangs_nobody(group):
    config = two.ppo_ptx()
    learner = tiny.build(two.alone(config))
    batches = [tiny.judged(learner, lengths) for lengths in ((4,), (2, 3))]
    two.train(learner, batches)
    for strategy in ("fsdp", "ddp"):
        state = two.in_both(group, two.train_new, two.paired(config, strategy), batches)
        two.assert_same_state(state, learner.get_state())


def test_shards_refuse_a_batch_that_is_not_finite_and_learn_from_the_next(group, tmp_path):
    config = two.ppo_ptx(refused_batch_dir=str(tmp_path), num_epochs=1, minibatch_size=None)
    learner = tiny.build(config)
    good = two.judged_batches(learner, num=1)[0]
    bad = {**good, columns.SCORES: good[columns.SCORES] * float("nan")}
    pair = two.paired(config, "fsdp")
    after = two.in_both(group, two.train_new, pair, [bad])
    for name, tensor in tiny.parameters(learner).items():
        assert torch.equal(tensor, after["rl_module"][DEFAULT_MODULE_ID][name])
    assert after["rllib_llm"]["num_refused_updates"] == 1
    assert list(tmp_path.glob("refused_batch_*"))
    learnt = two.in_both(group, two.train_new, pair, [good], after)
    assert learnt["rllib_llm"]["num_updates"] == 1


def test_half_precision_layers_keep_float32_shards(group):
    """bf16 arithmetic: the same direction as float32 to three bits, weights and moments float32."""
    config = two.grpo(grad_clip=None, num_epochs=1, minibatch_size=None)
    learner = tiny.build(config)
    batches = two.judged_batches(learner, lengths=(3, 5, 1, 4, 2, 5), num=1)
    start = tiny.parameters(learner)
    two.train(learner, batches)
    config = config.copy(copy_frozen=False).language_model(mixed_precision="bf16")
    state = two.in_both(group, two.train_new, two.paired(config, "fsdp"), batches)
    ours, exact = state["rl_module"][DEFAULT_MODULE_ID], tiny.parameters(learner)
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    steps = [
        torch.cat([(after[name] - start[name]).flatten() for name in start])
        for after in (ours, exact)
    ]
    assert torch.cosine_similarity(*steps, dim=0) > 0.99


def test_gradients_of_two_learners_in_half_precision_are_summed_in_float32(group):
    """Each row alone has the same bfloat16 gradient wherever it is computed, so the sum differs
    by float32's round-off alone; summed in bfloat16 it would by 2^-9 of it."""
    config = two.grpo(grad_clip=None, num_epochs=1, minibatch_size=6, micro_batch_size=1)
    config = config.language_model(mixed_precision="bf16")
    learner = tiny.build(two.alone(config))
    batches = two.judged_batches(learner, lengths=(3, 5, 1, 4, 2, 5), num=1)
    start = tiny.parameters(learner)
    two.train(learner, batches)
    state = two.in_both(group, two.train_new, two.paired(config, "ddp"), batches)
    after = state["rl_module"][DEFAULT_MODULE_ID]
    for name, tensor in tiny.parameters(learner).items():
        step = float((tensor - start[name]).abs().max())
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-4 * step + 1e-9)


def test_shards_are_published_as_they_compute(group):
    config = two.grpo().language_model(mixed_precision="bf16")

    def states(learner, config):
        new = config.build_learner(spaces=two.SPACES)
        published = new.weights_exporter.state()
        return published, new.get_state()["rl_module"][DEFAULT_MODULE_ID]

    published, whole = two.in_both(group, states, two.paired(config, "fsdp"))
    for name, tensor in published.items():
        assert torch.equal(tensor, whole[name].to(torch.bfloat16))


@pytest.mark.parametrize("mixed_precision", [None, "bf16"])
def test_shards_of_all_learners_are_the_whole_policy(group, mixed_precision):
    """What each exports of its own, put together, is what the first would have gathered."""
    config = two.grpo().language_model(mixed_precision=mixed_precision)
    config = two.paired(config, "fsdp")

    def exported(learner):
        new = config.build_learner(spaces=two.SPACES)
        ticket = new.weights_exporter.export("store", checksum=True, shards=True)
        return ticket, new.weights_exporter.state()

    answers = [result.get() for result in group.foreach_learner(exported)]
    tickets, states = zip(*answers, strict=True)
    whole, gathered = unpack(join(tickets)), states[0]
    assert list(whole) == list(gathered) and states[1] == {}
    for name, tensor in gathered.items():
        assert whole[name].dtype == tensor.dtype and torch.equal(whole[name], tensor), name
    # Each has about half, and none all: the tied embedding once.
    sizes = [ticket.num_bytes for ticket in tickets]
    assert max(sizes) < 0.6 * join(tickets).num_bytes


def test_half_precision_layers_keep_a_float32_value_head(group):
    config = two.ppo_ptx(ptx_coeff=0.0).language_model(mixed_precision="bf16")
    batch = tiny.judged(tiny.build(two.alone(config)))

    def values_of_a_third(learner, config, batch):
        new = config.build_learner(spaces=two.SPACES)
        state = {name: t.clone() for name, t in new.module.get_state()[DEFAULT_MODULE_ID].items()}
        if state:  # the first learner has the whole state
            state["value_head.linear.bias"].fill_(1 / 3)
        import torch.distributed

        states = [state]
        torch.distributed.broadcast_object_list(states)
        new.module[DEFAULT_MODULE_ID].unwrapped().set_state(states[0])
        with torch.no_grad():
            return new.forward(batch)[columns.VALUES]

    values = two.in_both(group, values_of_a_third, two.paired(config, "fsdp"), batch)
    third = torch.tensor(1 / 3)  # in bfloat16 it would be 0.333984375
    mask = batch[columns.COMPLETION_MASK]
    assert torch.equal(values[mask], third.expand(int(mask.sum())))
