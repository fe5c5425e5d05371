"""Weights pushed to servers that follow nobody, in the shapes that their documentation has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from rllib_llm.modules.lora import is_adapter
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.shared.openai_client import RequestRefusedError, ServerError
from rllib_llm.weights.push import WeightsPush, open_servers
from tests.algorithms import tiny_runs as tiny
from tests.scripted_server import serving

QUICK = {"first_delay_s": 0.01, "max_attempts": 1}


class FakeVLLM:
    """vLLM's calls for RL: the order that they are allowed in, and what each takes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_open = self.is_paused = self.is_updating = self.has_loaded = False
        self.version, self.weights = "none", {}

    def __call__(self, path, body):
        self.calls.append(path)
        name = path.partition("?")[0].strip("/")
        allowed = {
            "init_weight_transfer_engine": True,
            "pause": True,
            "collective_rpc": self.is_paused,
            "update_weight_version": self.is_paused,
            "start_weight_update": self.is_open and self.is_paused and not self.is_updating,
            "update_weights": self.is_updating and not self.has_loaded,
            "finish_weight_update": self.has_loaded,
            "resume": not self.is_updating,
        }
        if not allowed[name]:
            return 400, {"error": {"message": f"{name} is out of order"}}, {}
        return 200, getattr(self, name)(body), {}

    def init_weight_transfer_engine(self, body):
        assert body == {"init_info": {}}
        self.is_open = True
        return {"message": "Weight transfer initialized"}

    def pause(self, body):
        self.is_paused = True
        return {"status": "paused"}

    def collective_rpc(self, body):
        assert body.keys() == {"method", "kwargs"} and body["method"] == "reload_weights"
        self.weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        return {"results": [None]}

    def update_weight_version(self, body):
        self.version = body["new_version"]
        return {"message": "Weight version updated"}

    def start_weight_update(self, body):
        self.is_updating, self.has_loaded = True, False
        return {"message": "Weight update started"}

    def update_weights(self, body):
        folder = Path(body["update_info"]["path"])
        assert folder.is_absolute()
        self.weights = load_file(folder / "model.safetensors")
        self.has_loaded = True
        return {"message": "Weights updated"}

    def finish_weight_update(self, body):
        self.version = body["weight_version"]
        self.is_updating = self.has_loaded = False
        return {"message": "Weight update finished"}

    def resume(self, body):
        self.is_paused = False
        return {"status": "resumed"}


class FakeSGLang:
    """SGLang's update_weights_from_disk."""

    def __init__(self, success: bool = True) -> None:
        self.success, self.version, self.weights = success, "none", {}

    def __call__(self, path, body):
        assert path == "/update_weights_from_disk"
        assert body["abort_all_requests"] is False and body["flush_cache"] is True
        if not self.success:
            return (
                400,
                {"success": False, "message": "Failed to load", "num_paused_requests": 0},
                {},
            )
        self.weights = load_file(Path(body["model_path"]) / "model.safetensors")
        self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}, {}


class FakeLoRAServer:
    """vLLM's adapters by their names: it refuses what vLLM 0.32 refuses, and answers in words."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.loaded: dict[str, Path] = {}

    def __call__(self, path, body):
        name, way = body["lora_name"], path.removeprefix("/v1/").removesuffix("_lora_adapter")
        self.calls.append((way, name))
        if way == "unload":
            if self.loaded.pop(name, None) is None:
                return 404, {"error": {"message": f"{name} cannot be found."}}, {}
            return 200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), {}
        assert way == "load" and body.keys() == {"lora_name", "lora_path", "load_inplace"}
        if name in self.loaded and not body["load_inplace"]:
            return 400, {"error": {"message": f"'{name}' has already been loaded."}}, {}
        self.loaded[name] = Path(body["lora_path"])
        load_file(self.loaded[name] / "adapter_model.safetensors")
        return 200, f"Success: LoRA adapter '{name}' added successfully.".encode(), {}


ONE_RELOAD = ["/collective_rpc", "/update_weight_version", "/resume"]
ONE_TRANSFER = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


@pytest.mark.parametrize(
    ("method", "once", "first_calls"),
    [
        ("reload", ONE_RELOAD, []),
        ("transfer", ONE_TRANSFER, ["/init_weight_transfer_engine"]),
    ],
)
def test_a_run_pushes_what_it_learns(ray_session, tmp_path, method, once, first_calls):
    vllm, sglang = FakeVLLM(), FakeSGLang()
    with serving(vllm) as first, serving(sglang) as second:
        config = tiny.grpo(off_policy="decoupled").weights(
            publish_every=2,
            push=[
                {"server": "vllm", "base_url": first.base_url, "method": method, **QUICK},
                {"server": "sglang", "base_url": second.base_url, **QUICK},
            ],
            push_folder=str(tmp_path / "pushed"),
        )
        with tiny.built(config) as algorithm:
            assert (vllm.version, sglang.version) == ("0.0", "0.0")
            algorithm.train()
            assert (vllm.version, sglang.version) == ("0.0", "0.0")
            assert algorithm.train()["weights"]["push_seconds"] > 0
            assert (vllm.version, sglang.version) == ("0.2", "0.2")
            learnt = tiny.weights(algorithm)
            for server in (vllm, sglang):
                for name, tensor in server.weights.items():
                    torch.testing.assert_close(tensor, learnt[f"model.{name}"], rtol=0, atol=0)
            algorithm.train()
            algorithm.train()
        left = sorted(path.name for path in (tmp_path / "pushed").iterdir())
    assert left == ["0.2", "0.4"]  # the last two
    pause = "/pause?mode=wait&clear_cache=true"
    assert vllm.calls == [pause, *first_calls, *once, *2 * [pause, *once]]


def test_a_server_that_does_not_take_them_ends_the_push_and_stays_paused(tmp_path):
    vllm = FakeVLLM()

    def export(folder):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"no tensors")

    def refuses(path, body):
        if path == "/update_weights":
            return 500, {"error": {"message": "cannot read"}}, {}
        return vllm(path, body)

    with serving(refuses) as server:
        entry = {"server": "vllm", "base_url": server.base_url, "method": "transfer", **QUICK}
        push = WeightsPush(open_servers([entry]), tmp_path, export)
        with pytest.raises(ServerError, match="/update_weights must answer"):
            push.push(0, 1)
        push.close()
    assert vllm.is_paused and vllm.version == "none"
    with serving(FakeSGLang(success=False)) as server:
        entry = {"server": "sglang", "base_url": server.base_url, **QUICK}
        push = WeightsPush(open_servers([entry]), tmp_path, export)
        with pytest.raises(RequestRefusedError, match="Failed to load"):
            push.push(0, 1)
        push.close()


def test_our_own_server_of_another_cluster_takes_them(tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    from rllib_llm.serving.security import Clients
    from tests.serving import tiny_server

    monkeypatch.setenv("ADMIN", "secret")
    made = tiny_server.service(update_weights_folder=tmp_path)
    other = tiny_server.model(seed=1)
    with tiny_server.running(made, Clients([], admin_key=b"secret")) as address:
        entry = {"server": "rllib_llm", "base_url": address, "api_key_env": "ADMIN"}
        push = WeightsPush(open_servers([entry]), tmp_path, other.save_pretrained)
        push.push(3, 7)
        push.close()
        assert made.weights.newest.label == "3.7"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"server": "tgi", "base_url": "http://h"}, "must be a mapping with `server`, one of"),
        ({"server": "vllm"}, "and `base_url`"),
        ("http://h", "must be a mapping"),
        (
            {"server": "vllm", "base_url": "http://h", "colour": 1},
            r"weights_push\[0\].*colour=1 must be a",
        ),
        (
            {"server": "vllm", "base_url": "http://h", "pause_mode": "x"},
            r"weights_push\[0\].*pause_mode='x' must be",
        ),
        ({"server": "vllm", "base_url": "http://h", "method": "x"}, "method='x' must be one of"),
        (
            {"server": "vllm", "base_url": "http://h", "method": "adapters"},
            r"weights_push\[0\].method='adapters' must be another without lora",
        ),
        ({"server": ["vllm"], "base_url": "http://h"}, "must be a mapping with `server`, one of"),
        ({"server": "vllm", "base_url": "http://h", "api_key_env": 3}, "api_key_env=3 must be"),
    ],
)
def test_an_entry_that_names_no_server_is_refused(entry, problem):
    with pytest.raises(ValueError, match=problem):
        tiny.grpo().weights(push=[json.loads(json.dumps(entry))]).validate()


def test_a_run_that_trains_adapters_pushes_whole_weights(ray_session, tmp_path):
    sglang = FakeSGLang()
    with serving(sglang) as server:
        entry = {"server": "sglang", "base_url": server.base_url, **QUICK}
        config = tiny.grpo(lr=0.01).language_model(lora={"r": 2})
        config.weights(push=[entry], push_folder=str(tmp_path / "pushed"))
        with tiny.built(config) as algorithm:
            algorithm.train()
            policy = algorithm.get_module().unwrapped().model
    assert sglang.version == "0.1" and not any(map(is_adapter, sglang.weights))
    pushed = load_causal_lm(str(tmp_path / "pushed" / "0.1"))
    trunk = load_causal_lm(tiny.MODEL)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        found, expected, before = (each(ids).logits for each in (pushed, policy, trunk))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, before, atol=1e-5)


def test_a_vllm_with_the_trunk_is_sent_adapters_alone(ray_session, tmp_path):
    vllm, sglang = FakeLoRAServer(), FakeSGLang()
    with serving(vllm) as first, serving(sglang) as second:
        entries = [
            {"server": "vllm", "base_url": first.base_url, "method": "adapters", "name": "p"},
            {"server": "sglang", "base_url": second.base_url},
        ]
        config = tiny.grpo(lr=0.01).language_model(lora={"r": 2, "target_modules": ["q_proj"]})
        config.weights(push=[each | QUICK for each in entries], push_folder=str(tmp_path / "new"))
        with tiny.built(config) as algorithm:
            before = vllm.loaded["p@0.0"]
            algorithm.train(), algorithm.train()
            policy = algorithm.get_module().unwrapped().model
            vllm.loaded.clear()  # as a server that was started again
            algorithm.train()
    assert vllm.calls == [
        ("load", "p@0.0"), ("load", "p@0.1"), ("unload", "p@0.0"), ("load", "p@0.2"),
        ("unload", "p@0.1"), ("load", "p@0.3"),
    ]  # fmt: skip
    assert sglang.version == "0.3" and not before.exists()
    folder = vllm.loaded["p@0.3"]
    sent = load_file(folder / "adapter_model.safetensors")
    own = {n: p for n, p in policy.named_parameters() if is_adapter(n)}
    whole = tmp_path / "new" / "0.3" / "model.safetensors"
    assert sum(t.nbytes for t in sent.values()) == sum(p.nbytes for p in own.values())
    assert (folder / "adapter_model.safetensors").stat().st_size < whole.stat().st_size / 10
    # peft itself reads them, on the trunk, as the policy that is learnt.
    read = PeftModel.from_pretrained(load_causal_lm(tiny.MODEL), str(folder))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, policy(ids).logits, rtol=0, atol=0)
