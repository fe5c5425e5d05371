"""How weights leave the learner."""

from __future__ import annotations

from rllib_llm.algorithms.settings.setting import Section, Setting

WEIGHTS = Section(
    "weights",
    "How new weights leave the learner.",
    (
        Setting(
            name="weights_transport",
            short="transport",
            type=str,
            default="store",
            choices=("store", "cuda_ipc", "nixl"),
            or_dotted=True,
            meaning="how weights travel to the samplers",
            note='"store": through the object store, everywhere; "cuda_ipc": they stay on the GPU '
            "that learner and samplers share, as fractions of one (on two buffers of their size "
            "there); \"nixl\": straight from the learner's memory into the samplers', by RDMA or "
            "NVLink where GPUs have it (`pip install 'rllib-llm[nixl]'`); a dotted path: a class "
            "or a function without arguments that makes one of your own. From the first time on "
            "that a sampler cannot read them, they go through the store.",
        ),
        Setting(
            name="weights_checksum",
            short="checksum",
            type=bool,
            default=False,
            meaning="whether every receiver compares a CRC-32 of the bytes",
            note="It fetches them again where it differs; costs half a second per GB on each side.",
        ),
        Setting(
            name="weights_name",
            short="name",
            type=str | None,
            default=None,
            meaning="the name under which other processes of the cluster follow this run's weights",
            note="Replicas of a server, say (`rllib_llm.weights.follower`); None: nobody.",
        ),
        Setting(
            name="weights_keep",
            short="keep",
            type=int,
            default=2,
            least=1,
            unit="versions",
            meaning="what stays in the object store for followers",
            reason="receivers ask for the latest weights",
            remedy="Use 1",
        ),
    ),
)
