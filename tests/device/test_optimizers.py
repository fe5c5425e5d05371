"""The optimiser's state on the pretend GPU: in host memory between steps."""

from __future__ import annotations

import torch
from torch import nn

from rllib_llm.learners.optimizer import offloaded_step


def test_an_offloaded_state_is_in_host_memory_between_steps(gpu):
    torch.manual_seed(0)
    models = [nn.Linear(6, 5).to("cuda") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    usual, offloaded = (
        torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in models
    )
    for _ in range(3):
        for model in models:
            model.zero_grad()
            model(torch.ones(4, 6).to("cuda")).square().sum().backward()
        usual.step()
        offloaded_step(offloaded, bucket_bytes=1)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one.detach().cpu(), other.detach().cpu())
        moments = offloaded.state[other]
        assert {moments[name].device.type for name in ("exp_avg", "exp_avg_sq")} == {"cpu"}
        assert usual.state[one]["exp_avg"].device.type == "cuda"
