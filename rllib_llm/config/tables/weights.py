"""How weights leave the learner."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.setting import Condition, Section, Settings, setting

PUSHES = Condition(
    "weights_push is set",
    lambda c: bool(c.weights_push),
    "without weights_push",
    "Set weights_push",
)


class Weights(Settings):
    """How new weights leave the learner."""

    weights_transport: str = setting(
        "store",
        "how weights travel to the samplers",
        note='"store": through the object store, everywhere; "cuda_ipc": they stay on the GPU '
        "that learner and samplers share, as fractions of one (on two buffers of their size "
        "there); \"nixl\": straight from the learner's memory into the samplers', by RDMA or "
        "NVLink where GPUs have it (`pip install 'rllib-llm[nixl]'`); a dotted path: a class "
        "or a function without arguments that makes one of your own. From the first time on "
        "that a sampler cannot read them, they go through the store.",
        choices=("store", "cuda_ipc", "nixl"),
        or_dotted=True,
        short="transport",
    )
    weights_checksum: bool = setting(
        False,
        "whether every receiver compares a CRC-32 of the bytes",
        note="It fetches them again where it differs; costs half a second per GB on each side.",
        short="checksum",
    )
    weights_name: str | None = setting(
        None,
        "the name under which other processes of the cluster follow this run's weights",
        note="Replicas of a server, say (`rllib_llm.weights.follower`); None: nobody.",
        short="name",
    )
    serve: dict[str, Any] | None = setting(
        None,
        "what a server is told that answers with the policy as it is learnt, beside the run",
        note="Settings of `rllib serve` by name, `{}` for none; it follows `weights_name` on "
        "the run's cluster and ends with the run.",
        remedy="Write {port: 8000}",
    )
    weights_push: list[Any] | None = setting(
        None,
        "which servers that follow nobody are given the weights, by the path of a folder",
        note="Each is {server: vllm | sglang | rllib_llm, base_url: ...}, with further "
        "settings of its class in `weights/push.py` and of the client (timeout_s, "
        "api_key_env).",
        short="push",
        remedy="Write [{server: vllm, base_url: http://host:8000}]",
    )
    weights_push_every: int = setting(
        1,
        "how often weights are pushed",
        unit="updates",
        least=1,
        acts=(PUSHES,),
        short="push_every",
    )
    weights_push_folder: str | None = setting(
        None,
        "the folder that weights are pushed by, which the servers see under the same path",
        note="None: `pushed` in the trial's folder. It holds the last two versions.",
        acts=(PUSHES,),
        short="push_folder",
    )
    weights_keep: int = setting(
        2,
        "what stays in the object store for followers",
        unit="versions",
        least=1,
        short="keep",
        reason="receivers ask for the latest weights",
        remedy="Use 1",
    )


WEIGHTS = Section.of("weights", Weights)
