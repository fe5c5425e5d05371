"""What all tests share: few threads for torch, and one Ray for the whole session."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before Ray or torch are imported: worker processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray would make its workers nicer by 15 than this process, which waits for them: beside anything
# else on the machine they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Ray answers a driver once its first workers have registered. On a machine so busy that they take
# longer than this it gives them up, and never answers.
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
# Processes in a shell's background ignore Ctrl-C, and so would the programs that tests start: tests
# that end them with it waited four minutes for each.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A Ray that a test starts is found by this process alone, not by others that test beside it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests import forked_workers  # noqa: E402
from tests.shaker import SEED, shake_process  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
OBJECT_STORE_BYTES = 256 * 1024**2
SHAKEN = {"worker_process_setup_hook": "tests.shaker.shake_worker"}
NUM_CPUS = 4  # slots for processes, whatever the machine has
# Their slow tests take minutes: workers begin with them, so that none has one left at the end. The
# first have three tests or more: behind fewer, xdist queues the next file on the same worker.
LONGEST_FIRST = (
    "tests/rollouts/test_model.py", "tests/test_processors.py", "tests/serving/test_on_ray.py",
    "tests/algorithms/test_exact_resumption.py", "tests/serving/test_memory.py",
    "tests/serving/test_haproxy.py", "tests/overseer/test_runs.py",
    "tests/algorithms/test_streaming.py", "tests/device/test_runs.py", "tests/test_chaos.py",
    "tests/algorithms/test_faults.py", "tests/serving/test_deployment.py",
    "tests/weights/test_nodes.py", "tests/algorithms/test_rlhf.py",
    "tests/device/test_processes.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shake",
        type=int,
        metavar="SEED",
        help="round matrix products otherwise wherever they are cut otherwise; see tests/shaker.py",
    )
    parser.addoption(
        "--part",
        default="1/1",
        metavar="I/N",
        help="of the chosen tests the I-th, the I+N-th, ...: N such runs are a whole one",
    )


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--shake")
    if seed is not None:
        os.environ[SEED] = str(seed)
        shake_process(seed)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
    yield  # to -m and -k: a part is of what they choose
    first, step = map(int, config.getoption("--part").split("/"))
    if not 1 <= first <= step:
        raise pytest.UsageError(f"--part {first}/{step}: the first number is 1 to {step}")
    others = [item for place, item in enumerate(items) if place % step != first - 1]
    config.hook.pytest_deselected(items=others)
    items[:] = items[first - 1 :: step]


def pytest_collection_finish() -> None:
    """What is collected and imported stays: garbage collections need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """Tests share a machine: one thread each, or OMP_NUM_THREADS."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray, started when the first test asks for it and shared by the others."""
    import ray

    for name in ("ray", "ray.tune", "ray.rllib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ray.shutdown()  # a local algorithm of an earlier test may have started one with other bounds
    forked_workers.install()
    with pytest.MonkeyPatch.context() as environment:  # workers import `tests`
        environment.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        start_ray()
    yield
    ray.shutdown()


def start_ray() -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=SHAKEN if SEED in os.environ else None,
    )


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of pretrained models and data sets that are too large for the repository:
    $RLLIB_LLM_SHARED, else `shared` beside the project. Tests that ask for it are skipped where
    there is none."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("RLLIB_LLM_SHARED", beside))
    if not (folder / "models").is_dir() or not (folder / "data").is_dir():
        pytest.skip(f"no models and data in {folder}: RLLIB_LLM_SHARED says where they are")
    return folder
