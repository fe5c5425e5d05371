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
        "the transport of weights to the samplers",
        note=(
            '"store": through Ray\'s object store, works everywhere; "cuda_ipc": shared on the '
            'GPU of learner and samplers (each with a fraction of it), in two buffers; "nixl": '
            "directly from the learner's memory to the samplers', by RDMA or NVLink where GPUs "
            "have it (`pip install 'rllib-llm[nixl]'`); a dotted path: your own class or "
            "function without arguments. If a sampler cannot read them, the store is used from "
            "then on."
        ),
        choices=("store", "cuda_ipc", "nixl"),
        or_dotted=True,
        short="transport",
    )
    weights_checksum: bool = setting(
        False,
        "whether every receiver verifies a CRC-32 of the bytes",
        note="On a mismatch it fetches them again; costs half a second per GB on each side.",
        short="checksum",
    )
    weights_name: str | None = setting(
        None,
        "the name under which other processes of the cluster can follow this run's weights",
        note=("For example replicas of a server (`rllib_llm.weights.receiver`); None: nobody can."),
        short="name",
    )
    serve: dict[str, Any] | None = setting(
        None,
        "the settings of a server that answers with the current policy during the run",
        note=(
            "By the names of `rllib serve`, `{}` for the defaults; it follows "
            "`weights_name` on the run's cluster and ends with the run."
        ),
        remedy="Write {port: 8000}",
    )
    weights_push: list[Any] | None = setting(
        None,
        "servers to which weights are pushed through a folder, for servers that cannot "
        "follow a run",
        note=(
            "Each is {server: vllm | sglang | rllib_llm, base_url: ...}, with further settings "
            "of its class in `weights/push.py` and of the client (timeout_s, api_key_env)."
        ),
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
        "the folder through which weights are pushed, mounted under the same path on the servers",
        note="None: `pushed` in the trial's folder. It holds the last two versions.",
        acts=(PUSHES,),
        short="push_folder",
    )
    weights_keep: int = setting(
        2,
        "the number kept in the object store for followers",
        unit="versions",
        least=1,
        short="keep",
        reason="receivers ask for the latest weights",
        remedy="Use 1",
    )


WEIGHTS = Section.of("weights", Weights)
