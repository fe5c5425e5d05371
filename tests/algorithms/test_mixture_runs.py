"""A run of a mixture of experts: its samplers' choices reach the learner from another process."""

from __future__ import annotations

from tests.algorithms import tiny_runs


def test_a_stream_of_rows_has_the_experts_that_were_chosen(ray_session):
    """In bfloat16, of routers that like three experts alike but for roundings: groups of one prompt
    as rows that enter one by one, and some that are learnt from again."""
    config = tiny_runs.grpo(
        ref_kl_coeff=0.0, num_epochs=1, minibatch_size=None, lr=1e-9, off_policy="decoupled"
    )
    config.language_model(model=f"{tiny_runs.HERE}.build_tied_mixture", mixed_precision="bf16")
    config.experts(routing_replay=True, router_aux_coeff=0.01).env_runners(num_env_runners=1)
    config.streaming(max_staleness=1, schedule="free").replay(groups=2)
    with tiny_runs.built(config) as algorithm:
        results = [algorithm.train() for _ in range(3)]
    for result in results:
        assert result["sampler"]["logprob_gap"] < 0.1
        assert 0 < result["train"]["router_aux_loss"] <= 6
