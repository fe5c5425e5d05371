"""How weights leave the learner: settings, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_llm.config.sections import wrong
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problem, refusals
from rllib_llm.shared.setting import Section, Settings, setting, when
from rllib_llm.weights.transport import is_own

PUSHES = when("weights_push", "is set", bool, "Set weights_push")


class Weights(Settings):
    """How new weights leave the learner."""

    weights_publish_every: int = setting(
        1, "how often new weights are published: to samplers, followers and servers alike",
        note="Above 1, completions are older than the policy by up to so many updates less one, "
        "for which `off_policy` corrects; a sampler in the learner's process has a copy of its "
        "own; evaluation has the newest weights.", unit="updates", least=1,
        short="publish_every", also="weights_push_every sync_every weight_sync_interval "
        "trigger_parameter_sync_step",
    )  # fmt: skip
    weights_transport: str = setting(
        "store", "the transport of weights to the samplers",
        note='"store": through Ray\'s object store, works everywhere; "cuda_ipc": shared on the '
        'GPU of learner and samplers (each with a fraction of it), in two buffers; "nixl": '
        "directly from the learner's memory to the samplers', by RDMA or NVLink where GPUs "
        "have it (`pip install 'rllib-llm[nixl]'`); a dotted path: your own class or "
        "function without arguments. If a sampler cannot read them, the store is used from "
        "then on.", choices=("store", "cuda_ipc", "nixl"), or_dotted=True, short="transport",
    )  # fmt: skip
    weights_checksum: bool = setting(
        False, "whether every receiver verifies a CRC-32 of the bytes",
        note="On a mismatch it fetches them again; costs half a second per GB on each side.",
        short="checksum",
    )  # fmt: skip
    weights_name: str | None = setting(
        None, "the name under which other processes of the cluster can follow this run's weights",
        note="For example replicas of a server (`rllib_llm.weights.receiver`); None: nobody can.",
        short="name",
    )  # fmt: skip
    serve: dict[str, Any] | None = setting(
        None, "the settings of a server that answers with the current policy during the run",
        note="By the names of `rllib serve`, `{}` for the defaults; it follows `weights_name` on "
        "the run's cluster and ends with the run.", remedy="Write {port: 8000}",
    )  # fmt: skip
    weights_push: list[Any] | None = setting(
        None, "servers to which weights are pushed through a folder, for servers that cannot "
        "follow a run", note="Each is {server: vllm | sglang | rllib_llm, base_url: ...}, with "
        "further settings of its class in `weights/push.py` and of the client (timeout_s, "
        "api_key_env).", short="push", remedy="Write [{server: vllm, base_url: http://host:8000}]",
    )  # fmt: skip
    weights_push_folder: str | None = setting(
        None, "the folder through which weights are pushed, mounted under the same path on the "
        "servers", note="None: `pushed` in the trial's folder. It holds the last two versions.",
        acts=(PUSHES,), short="push_folder",
    )  # fmt: skip
    weights_keep: int = setting(
        2, "the number kept in the object store for followers", unit="versions", least=1,
        short="keep", reason="receivers ask for the latest weights",
    )  # fmt: skip


WEIGHTS = Section.of("weights", Weights)


# --- what must hold between them --------------------------------------------------------------


def transport_rules(config: Any) -> Iterator[Problem]:
    """The chosen transport can bring the weights to samplers."""
    name = config.weights_transport
    if name == "store" or config.in_evaluation:
        return
    share = "Give learner and samplers fractions of one GPU"
    rules = [("num_env_runners", config.num_env_runners > 0, "above 0", "others share the module",
              "Use 1")]  # fmt: skip
    if is_own(name):
        made_by = import_dotted(name, name="weights_transport")
        if not callable(made_by):
            yield wrong(config, "weights_transport", "a class or a function that makes a transport",
                        f"it is {type(made_by).__name__}", "Name another")  # fmt: skip
    else:  # samplers read the weights in the learner's memory
        sharded = config.num_learners > 1 and config.learner_strategy == "fsdp"
        rules += [
            ("engine", config.engine == "torch", "'torch'", "others load from host memory",
             "Use it"),
            ("learner_strategy", not sharded, "'ddp'", "no learner has all weights", "Use 'ddp'"),
            ("weights_checksum", not config.weights_checksum, "False",
             "it is computed in host memory", "Leave it out"),
            ("weights_name", config.weights_name is None, "None",
             "who follows reads from the store", "Leave it out"),
        ]  # fmt: skip
    if name == "cuda_ipc":
        rules += [(f"num_gpus_per_{side}", getattr(config, f"num_gpus_per_{side}") > 0, "above 0",
                   "they stay on it", share) for side in ("learner", "env_runner")]  # fmt: skip
    for subject, holds, rule, reason, remedy in rules:
        if not holds:
            yield wrong(config, subject, f"{rule} with weights_transport={name!r}", reason,
                        f"{remedy}, or weights_transport='store'")  # fmt: skip


def follower_rules(config: Any) -> Iterator[Problem]:
    """Others than the samplers can be given the weights."""
    if config.in_evaluation:
        return
    if config.weights_push:
        from rllib_llm.weights.push import open_servers  # few runs need it

        for i, server in enumerate(open_servers(config.weights_push)):
            server.close()
            if server.takes_adapters and config.lora is None:
                yield Problem(f"weights_push[{i}].method", "be another without lora",
                              "there are no adapters", "Set lora={}, or leave it out", "adapters"
                              )  # fmt: skip
    if config.serve is None:
        return
    if config.weights_name is None:
        yield wrong(config, "weights_name", "a name with serve",
                    "the server finds the run's weights by it", "Set weights_name='my-run'"
                    )  # fmt: skip
    # Here, since few runs need it.
    from rllib_llm.serving.settings import check_without_keys, read_settings

    check_without_keys(config.serve, "serve.", "a run's settings are written to its files")
    served = {"model": config.given_model(), **config.serve}
    yield from (problem.within("serve") for problem in refusals(read_settings, served))
